"""From a call to the name of a resource."""
