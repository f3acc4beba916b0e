"""Forage: a discovery feed as an application of Millstream.

The state is a log: items, signals, impressions and what each user hid are tables of one stream, and the engine is a
fold of it. Everything that Forage uses of Millstream is public.
"""
