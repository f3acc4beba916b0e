"""Delivery to consumers: named readers whose positions the home stores.

Start at `service`, a stream's consumers in the process that has their state, and `running_consumer`, one of
them. `definition` says what a consumer receives, `records` makes its messages, `consumer_store` keeps its state,
and `push_retries` sends to a push sink (`sinks`, `webhook_sink`, `redis_stream_sink`, `command_sink`, `kafka`).
`millstream.protocol.delivery` decides which message is delivered when.
"""
