"""Options and settings, checked when they are declared, and the lock of each task."""
