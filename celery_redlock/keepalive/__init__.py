"""Extend leases while their work runs, and release the leases of dead processes."""
