"""The life of one task's message: it is published, received, run, sent again, ended."""
