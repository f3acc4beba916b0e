"""Application writes: callers' rows become columns of the log's types, under schemas that grow within the rules."""
