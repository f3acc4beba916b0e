"""Figures next to their peers', measured in one run; `make bench [ONLY=prefix]`.

The main job: `capture` and `landing` have rates, `latency` and `freshness` lags, `cluster` and `aged` a larger and an older lake.
"""
