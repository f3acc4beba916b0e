"""Copying a table next to the stream of its changes: chunks, workers, pace, and repeated copies."""
