"""How records enter a log: the queue, commit groups, segments, marks, and recovery before all of it."""
