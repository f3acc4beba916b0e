"""`diff`: compares the lake with its source, by key and value, while both move; and has differing rows read again."""
