"""A log on another machine: the leader ships bytes, the follower verifies and keeps them; roles can change."""
