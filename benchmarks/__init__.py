"""Speed of the lock against the bare limit and against its peers: `make bench`."""
