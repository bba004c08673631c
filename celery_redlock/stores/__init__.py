"""The stores that keep leases: one package for each kind of server."""
