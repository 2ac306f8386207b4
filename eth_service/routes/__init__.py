"""HTTP routes, a file a subject."""
