"""Topics in Kafka as a consumer's sink: its transactions, and the formats of its messages."""
