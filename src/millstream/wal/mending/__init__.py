"""Inspection and repair of a log that may be damaged; repair is the only way past damage."""
