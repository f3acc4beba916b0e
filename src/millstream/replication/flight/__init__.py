"""Shipments over Arrow Flight: `transport` joins the leader's and the follower's end of a link; `wire` has its messages."""
