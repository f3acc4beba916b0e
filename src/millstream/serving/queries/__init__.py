"""Answers SQL queries in worker processes with bounds on their memory and time."""
