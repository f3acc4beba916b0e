"""`diff`: the lake held against its source, by key and value, while both move; and having what differs read again."""
