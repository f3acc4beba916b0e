"""Worlds of a partitioned table: a receiver of kind `latest` that follows each message has the rows of the source.

A row moves between partitions as at a source: a delete in one, an insert in the other. The receiver keeps each row with
the partition that its message names, and removes the rows of a partition at an `x`. If answers from before a kill are
still acknowledged after it, the receiver also keeps the numbers of rows, and an older message changes nothing: it may
come again while the ack of a later one is on its way.

python -m tests.protocol.delivery_leaves FIRST COUNT
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from tests.protocol.delivery_latest import LatestWorld
from tests.protocol.delivery_world import BARRIER_TABLE
from tests.seeds import main

from millstream.protocol.delivery import Consumer, Delivery, Message, position_of

LEAVES = (11, 12, 13)
KEYS = 3


class Row(NamedTuple):
    """The content of a message: a row's partition after it."""

    key: str
    leaf: int | None
    """None: the row is gone."""


class LeavesWorld(LatestWorld):
    """A world drawn from a seed, without dead letters, promotions and rewinds that skip records."""

    def __init__(self, seed: int, *, pick: Callable[[int], int] | None = None) -> None:
        self.source: dict[str, int] = {}
        """The partition of each row."""
        self.moving: tuple[str, int] | None = None
        """A row between its delete and its insert."""
        self.received: dict[str, Row] = {}
        """The newest message of each key, also of rows that are gone."""
        self.at: dict[str, int] = {}
        """Its position."""
        self.has_numbers = False
        super().__init__(seed, pick=pick)
        self.has_numbers = bool(self.pick(2))

    def started(self) -> Consumer:
        self.limits = self.reference.limits = replace(self.limits, max_deliver=0)
        if not self.has_numbers:
            self.clients = []
        return super().started()

    def actions(self) -> list[tuple[str, Callable[[], None]]]:
        return [(name, action) for name, action in super().actions() if name not in {"promote", "letters"}]

    def rewind(self) -> None:
        """Rewind to a token that isn't later than the cursor."""
        tokens = [token for token in {0, *(one.before for one in self.messages())} if token <= self.consumer.cursor]
        cursor = sorted(tokens)[self.pick(len(tokens))]
        self.consumer.rewind(cursor)
        self.at = {}
        self.reference.begin_generation(cursor, position_of(cursor, 1))
        self.redelivered_from(cursor)
        self.keep()
        self.durable = len(self.log)

    def message(self, position: int, before: int) -> Message:
        id_ = f"shop-0-{self.epoch}-{position}"
        size = 10 + self.pick(40)
        if self.moving is None and not self.pick(8):
            leaf = None if not self.pick(4) else LEAVES[self.pick(len(LEAVES))]
            self.source = {} if leaf is None else {key: at for key, at in self.source.items() if at != leaf}
            return Message(position, before, id_, (), BARRIER_TABLE, True, size, leaf, truncates=True, leaf=leaf)
        if self.moving is not None:
            (key, leaf), self.moving = self.moving, None
            self.source[key] = leaf
        else:
            key = str(self.pick(KEYS))
            known = self.source.get(key)
            what = self.pick(4)
            leaf = LEAVES[self.pick(len(LEAVES))] if known is None else known
            if known is None or what < 2:
                self.source[key] = leaf
            else:
                del self.source[key]
                other = LEAVES[self.pick(len(LEAVES))]
                if what == 2 and other != known:
                    self.moving = key, other
                return Message(position, before, id_, (key,), BARRIER_TABLE, False, size, Row(key, None), leaf=known)
        return Message(position, before, id_, (key,), BARRIER_TABLE, False, size, Row(key, leaf), leaf=leaf)

    def answered(self, count: int) -> list[Delivery]:
        """Receive an answer and follow it; at times a client goes away before that, and never acknowledges it."""
        answer = super().answered(count)
        if answer and not self.pick(5):
            del self.clients[-len(answer) :]
            return []
        for delivery in answer:
            self.follow(delivery.message)
        return answer

    def follow(self, message: Message) -> None:
        """Apply a message to the receiver's rows."""
        if isinstance(message.origin, Row):
            rows = [message.origin]
        else:
            taken = [row for row in self.received.values() if message.leaf in {None, row.leaf}]
            rows = [row._replace(leaf=None) for row in taken]
        for row in rows:
            if not self.has_numbers or self.at.get(row.key, 0) <= message.position:
                self.received[row.key], self.at[row.key] = row, message.position

    def drain(self) -> None:
        super().drain()
        if self.consumer.unsettled:
            return
        received = {row.key: row.leaf for row in self.received.values() if row.leaf is not None}
        if received != self.source:
            self.broken(f"the receiver has {received}, and the source {self.source}")


if __name__ == "__main__":
    sys.exit(main(LeavesWorld, sys.argv[1:]))
