"""Figures beside their peers, measured in one run; `make bench [ONLY=prefix]`."""
