"""Delivery to one consumer: at least once, in the order of each group, with one answer in flight per group.

`Consumer` is the machine of kind `changes`, `LatestConsumer` that of kind `latest`. Neither does I/O. The caller reads the log, filters it, and offers `Message`s. It carries
answers to clients, and the ids of their deliveries back.

A caller's loop, for a `receive` of n messages:

    consumer.expire(now)
    while consumer.wants(n) and there is more in the log behind consumer.read_upto:
        consumer.offer(messages, upto)
    answer = consumer.receive(now, n)
    changes = consumer.take_changes()  # to be durable within a second

`next_wake` is the time at which `expire` has work. `ack`, `nack` and `extend` take `DeliveryId`s, whose fields the
caller signs as an `ack_id`, and return a `Status` for each. `pause`, `resume`, `rewind`, `cut_off`, `cut_back`, `hold`,
`retry` and `drop` steer.

Premises
--------
1. Messages are offered in the order of their positions. A position names one record while the log keeps its end; after
   a promotion that lost records the caller calls `cut_back` before it offers anything.
2. The stored changes are a prefix of those that `take_changes` returned. `Started`, the first change of a run, is
   durable before the run's first answer. The numbers of runs grow, also past runs that were forgotten.
3. A `DeliveryId` that comes back was given by this consumer: signatures ensure that.

Durable state
-------------
`State.begin(cursor)` with changes applied by `State.apply` is a state to restart from. `snapshot` returns the same
state at once, so that the changes before it can be dropped. A restart reads the log again from `read_upto`, which is
the durable cursor; so retention keeps the log from the durable cursor, not from `Consumer.cursor`. Before the messages
in flight are offered again (`is_restored`), nothing is delivered. The caller reads up to there before it passes on nacks:
until then a nack returns only its own message.

The caller stores the record of a dead message with its `Died`, and removes it with its `Dropped`. A retried message
(`Consumer.retried`) still needs it, since the log may be gone.

The life of a message:

    | event                              | waiting                 | in flight                       | settled  | dead         |
    |------------------------------------|-------------------------|---------------------------------|----------|--------------|
    | receive, if it is free             | in flight               | -                               | -        | -            |
    | ack of its last delivery           | settled                 | settled                         | -        | gone         |
    | nack of its last delivery          | waits for the delay     | waiting, with its group's later | -        | -            |
    | extension of its last delivery     | in flight               | in flight until then            | -        | -            |
    | ack of an earlier delivery         | superseded              | superseded                      | -        | gone         |
    | nack, extension of an earlier      | superseded              | superseded                      | -        | dead         |
    | expiry                             | -                       | waiting, with its group's later | -        | -            |
    | its failure number `max_deliver`   | dead                    | dead                            | -        | -            |
    | retry                              | -                       | -                               | -        | waiting      |
    | rewind                             | forgotten               | forgotten                       | forgotten| -            |

A message is *free* if it is the first waiting one of each of its groups, none of them is in flight by another answer, no
barrier of its table holds it, and its delay is over. A delivery fails, once, by a nack of the message itself, or by its
expiry as the first unsettled message of its groups.

Messages that are offered together and share no group with another unsettled message are a run (`runs`): it is delivered
and settled by ranges, without a state for each message. The first step that tells one of them apart, such as a failure or
an acknowledgement out of order, gives each of them a state of its own, and the rules above are the same for both.

A consumer of kind `latest` is offered messages of one group each, and barriers. The two halves of a key change are two
messages (`position_of` with part 0 and 1). `merge` gives the message that stands for an older and a newer one.
"""

from __future__ import annotations

from millstream.protocol.delivery.consumer import Consumer
from millstream.protocol.delivery.latest import LatestConsumer
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
from millstream.protocol.delivery.state_changes import Change, Died, Dropped, Rewound, decode, encode

__all__ = [
    "Change",
    "Consumer",
    "Counters",
    "DeadLetter",
    "Delivery",
    "DeliveryId",
    "Died",
    "Dropped",
    "LatestConsumer",
    "Limits",
    "Message",
    "Phase",
    "Rewound",
    "State",
    "Status",
    "decode",
    "encode",
    "position_of",
    "seq_of",
]
