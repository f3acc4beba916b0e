"""Figures next to their peers', measured in one run; `make bench [ONLY=prefix]`."""
