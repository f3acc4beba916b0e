"""Delta logs in an object store: copies, which save a pipeline most of its requests, and commits whose answer was lost."""
