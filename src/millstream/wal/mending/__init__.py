"""Looking at a log that may be damaged, and the only way past damage."""
