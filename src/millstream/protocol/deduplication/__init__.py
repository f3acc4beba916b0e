"""Deduplication of applications' writes: the state that recognizes a repeated write, and its lookup for a commit group."""
