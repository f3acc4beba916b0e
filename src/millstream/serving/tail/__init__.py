"""Tails: records of a stream as they come, as server-sent events."""
