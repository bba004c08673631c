"""One tick, one message, however many beats run."""
