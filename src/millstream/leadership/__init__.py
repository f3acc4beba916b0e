"""Who leads a stream: roles, promises, and what other nodes answer."""
