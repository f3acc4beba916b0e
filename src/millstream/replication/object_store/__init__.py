"""A log in an object store: `layout` names its objects, `writer` and `reader` are the two ends, `scrub` verifies it."""
