"""Leadership of a stream: roles, promises, and other nodes' answers."""
