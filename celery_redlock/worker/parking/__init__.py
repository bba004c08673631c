"""Deliveries that wait for their lock without a pool slot."""
