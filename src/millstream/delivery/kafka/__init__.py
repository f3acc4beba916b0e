"""Topics in Kafka as a consumer's sink: its transactions, and the formats of its messages.

Start at `sink`. `ledger` keeps what a transaction has committed, so that no message is sent twice. `debezium`
encodes records as Debezium's PostgreSQL connector does.
"""
