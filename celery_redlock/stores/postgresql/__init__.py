"""Leases in one table of a PostgreSQL database."""
