"""Changes of a consumer's durable state, in the order in which the machine makes them, and their form as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from millstream.protocol.delivery.messages import DeadLetter, Message, Phase


class Started(NamedTuple):
    """A run of the machine began. It has to be durable before the run's first answer."""

    run: int


class Timed(NamedTuple):
    """The time, noted now and then. An earlier one than before shows that the clock was set back while no run was there."""

    now: int


class Delivered(NamedTuple):
    """An answer was given."""

    run: int
    answer: int
    deadline: int
    positions: Sequence[int]


class Extended(NamedTuple):
    """Deliveries of an answer are in flight until another time; those that had come back are in flight again."""

    run: int
    answer: int
    deadline: int
    positions: Sequence[int]


class Returned(NamedTuple):
    """Messages came back: they wait for their next delivery."""

    positions: Sequence[int]
    failed: Sequence[int]
    """The messages whose own delivery failed, which counts for `max_deliver`; they may have come back earlier."""
    until: int = 0
    """When the failed messages may be delivered again; 0: at once."""


class Delayed(NamedTuple):
    """Messages that replace others wait as those did."""

    positions: Sequence[int]
    until: int


class Settled(NamedTuple):
    """Messages are settled."""

    positions: Sequence[int]
    acked: int
    """Number of acks that count."""
    is_unread: bool = False
    """Whether a delivery that a kill forgot was acknowledged before its message was offered again."""


class Relied(NamedTuple):
    """Messages of kind `latest` were dropped, since newer ones of their keys are in the log: the cursor stays for now."""

    upto: int
    """The `seq` up to which the log has the newer ones; 0 once they are settled."""


class Died(NamedTuple):
    """A message is dead. The caller stores its record with this change."""

    letter: DeadLetter


class Overtaken(NamedTuple):
    """The groups of dead letters have newer messages."""

    ids: Sequence[str]


class Retried(NamedTuple):
    """Dead messages wait for delivery again. The caller keeps their records until they are settled."""

    ids: Sequence[str]


class Dropped(NamedTuple):
    """Dead or retried messages are gone, and with them their stored records."""

    ids: Sequence[str]
    acked: int = 0
    """Number of acks that dropped one."""


class Moved(NamedTuple):
    """The cursor moved."""

    cursor: int


class Rewound(NamedTuple):
    """A new generation began: all before it is void. Retried messages are dead letters again."""

    generation: int
    cursor: int
    end: int | None = None
    """The `seq` of the last operation that the log has kept, if it lost its end."""


class Steered(NamedTuple):
    """The phase changed."""

    phase: Phase
    reason: str | None = None
    """The reason why a consumer was paused, if no operator did it."""


Change: TypeAlias = (
    Started
    | Timed
    | Delivered
    | Extended
    | Returned
    | Delayed
    | Settled
    | Relied
    | Died
    | Overtaken
    | Retried
    | Dropped
    | Moved
    | Rewound
    | Steered
)

_TAGS: Final[dict[type[Any], str]] = {
    Started: "run", Timed: "time", Delivered: "d", Extended: "e", Returned: "r", Delayed: "w", Settled: "s", Relied: "relied", Died: "dead", Overtaken: "overtaken", Retried: "retried",
    Dropped: "dropped", Moved: "c", Rewound: "rewound", Steered: "phase",
}  # fmt: skip
_KINDS: Final[dict[str, Any]] = {tag: kind for kind, tag in _TAGS.items()}


def encode(change: Change) -> list[Any]:
    """Return a change as a value that JSON can hold."""
    if isinstance(change, Died):
        return [_TAGS[Died], *letter_to_json(change.letter)]
    return [_TAGS[type(change)], *change]


def decode(value: Sequence[Any]) -> Change:
    """Return the change of `encode`'s value. Raises `KeyError` or `TypeError` for other values."""
    kind = _KINDS[value[0]]
    if kind is Died:
        return Died(letter_from_json(value[1:]))
    if kind is Steered:
        return Steered(Phase(value[1]), *value[2:])
    change: Change = kind(*value[1:])
    return change


def letter_to_json(letter: DeadLetter) -> list[Any]:
    """Return a dead letter, without its record, as a value that JSON can hold: a partition is named if one is known."""
    message = letter.message
    leaf = () if message.leaf is None else (message.leaf,)
    return [*message[:3], list(message.groups), *message[4:7], message.truncates, *letter[1:], *leaf]


def letter_from_json(value: Sequence[Any]) -> DeadLetter:
    """Return the dead letter of `letter_to_json`'s value."""
    position, before, id_, groups, table, barrier, size, truncates, *rest = value
    deliveries, error, died, generation, overtaken, *leaf = rest
    message = Message(position, before, id_, tuple(groups), table, barrier, size, None, truncates, *leaf)
    return DeadLetter(message, deliveries, error, died, generation, overtaken)
