"""Send one message per tick, however many beats run."""
