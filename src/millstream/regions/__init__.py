"""Regions that write apart: merged tables, reconciliation, and what retention keeps for them."""
