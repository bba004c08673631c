"""Locks in an ensemble of Apache ZooKeeper."""
