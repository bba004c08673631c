"""Keeps leases alive while their work runs, and frees those of the dead."""
