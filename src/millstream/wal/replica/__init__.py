"""A log on another machine: the leader's end that hands out bytes, the follower's that verifies and keeps them, and how one becomes the other."""
