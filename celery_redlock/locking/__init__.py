"""The lock that users hold, and who waits for it."""
