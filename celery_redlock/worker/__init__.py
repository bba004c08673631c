"""What a worker does once: at its start, and beside its tasks."""
