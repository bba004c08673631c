"""The lock that users hold, and its wait queue."""
