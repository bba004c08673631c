"""Names of resources, made from the calls of tasks."""
