"""Options and settings, checked at birth, and how each task is locked."""
