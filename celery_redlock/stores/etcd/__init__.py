"""Leases in an etcd cluster."""
