"""Alerts by webhook about the conditions that an operator should know of.

`millstream.app.trouble_rules` has the rules. `observations` are the facts whose duration counts, `open_alerts` decides which alert
is due, `alert_sender` looks repeatedly and sends.
"""
