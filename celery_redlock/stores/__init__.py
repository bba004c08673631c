"""What a lease is kept in: a package a kind of server."""
