"""A log in an object store: `object_names` names its objects, `writer` and `reader` are the two ends, `scrub` verifies it."""
