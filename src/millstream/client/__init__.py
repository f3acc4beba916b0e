"""Homes behind an address: what travels, and who asks. Needs the core and `millstream[client]` alone."""
