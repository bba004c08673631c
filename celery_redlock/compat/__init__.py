"""Other libraries' interfaces over `SingletonTask`: changing an import moves a project over.

A module each: `once` for celery-once, `singleton` for celery-singleton. What they do differently,
and how to leave them behind, is in docs/migrating.md.
"""
