"""Copying a table beside the stream of its changes: chunks, workers, pace, and copying again what needs it."""
