"""Serves Arrow Flight: append and read as columns."""
