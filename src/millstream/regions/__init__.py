"""Regions that write independently: merged tables, reconciliation, and what retention keeps for them."""
