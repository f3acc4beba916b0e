"""Application writes: rows as callers have them become columns of the log's types, under schemas that grow as is allowed."""
