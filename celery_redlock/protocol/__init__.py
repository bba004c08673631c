"""The algorithm: what is asked, what answers mean, and how long a lease is held. Pure."""
