"""A stream's log on other machines: the shipper at its leader, the follower, and the transports between them."""
