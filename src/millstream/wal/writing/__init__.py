"""The write path of a log: the queue, commit groups, segments and marks, and recovery, which comes first."""
