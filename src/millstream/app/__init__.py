"""A home put together: configuration, owner, supervision, status, metrics; what `millstream.open` gives.

Nothing here is imported by the rooms below; heavy parts are imported where they are used.
"""
