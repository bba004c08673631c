"""The algorithm: requests, the meaning of their answers, and how long a lease is held. Pure."""
