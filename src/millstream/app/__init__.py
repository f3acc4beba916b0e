"""A whole home: configuration, owner, supervision, status, metrics; and the API of `millstream.open`.

The rooms below import nothing from here; heavy parts are imported where they are used.
"""
