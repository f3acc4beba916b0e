"""Conditions that an operator should know of: one home for their rules, and their alerts by webhook.

`conditions` judges a home's status, for `status`, `doctor` and alerts. `open_alerts` decides which alert is due, `alert_sender`
looks repeatedly and sends.
"""
