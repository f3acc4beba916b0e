"""Delivery to one consumer: at least once, in the order of each group, with one answer in flight per group.

`Consumer` is the machine, and does no I/O. The caller reads the log, filters it, and offers `Message`s; it carries
answers to the client, and ids of deliveries back.

A caller's loop, for a `receive` of n messages:

    consumer.expire(now)
    while consumer.wants(n) and (there is more in the log behind consumer.read_upto):
        consumer.offer(messages, upto)
    answer = consumer.receive(now, n)
    changes = consumer.take_changes()      # appended to the state's log; durable within a second

`consumer.next_wake()` is the time at which `expire` has work. `ack`, `nack` and `extend` take `DeliveryId`s, whose
fields the service signs as an `ack_id`, and return a `Status` each. `pause`, `resume`, `rewind`, `cut_off`, `cut_back`,
`retry` and `drop` steer.

Durable state: `take_changes` returns what changed, in order. `State.begin(cursor)` with a prefix of all changes applied
is a state to restart from: `Consumer(limits, state, run=…)`. `consumer.snapshot()` returns the same state at once, so
that the changes before it can be dropped. A restart reads the log from `read_upto` again, which is the durable cursor.
Retention must keep the log from the *durable* cursor, not from `consumer.cursor`.
"""

from __future__ import annotations

from millstream.protocol.delivery.changes import Change, Died, Dropped, decode, encode
from millstream.protocol.delivery.consumer import Consumer
from millstream.protocol.delivery.messages import (
    DeadLetter,
    Delivery,
    DeliveryId,
    Limits,
    Message,
    Phase,
    Status,
    position_of,
    seq_of,
)
from millstream.protocol.delivery.state import Counters, State

__all__ = [
    "Change",
    "Consumer",
    "Counters",
    "DeadLetter",
    "Delivery",
    "DeliveryId",
    "Died",
    "Dropped",
    "Limits",
    "Message",
    "Phase",
    "State",
    "Status",
    "decode",
    "encode",
    "position_of",
    "seq_of",
]
