"""Other libraries' interfaces over `SingletonTask`: a changed import migrates a project.

One module each: `once` for celery-once, `singleton` for celery-singleton. docs/migrating.md lists
their differences from the originals, and describes how to leave them behind.
"""
