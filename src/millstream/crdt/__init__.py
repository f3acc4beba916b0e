"""States that merge in any order: counters, registers, flags, sets, signals, and the clock that orders their writes.

    from millstream.crdt import Actor, PNCounter

    here, there = PNCounter().add(Actor(1), 5), PNCounter().add(Actor(2), -2)
    here.join(there).value  # 3

A state is an immutable value. Each kind is a join semilattice: `join` is commutative, associative and idempotent, and
its result holds everything that either side held. Deliveries may come in any order, twice, or many at once; processes
that have received the same ones have equal states. `encode` returns the same bytes for equal states, and `decode`
rejects all other bytes. Merging tables use these classes for their columns (`[streams.S.merge]`).

Names are looked up when they are first used (PEP 562): a process that needs a clock alone loads nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream.crdt.counters import Actor as Actor
    from millstream.crdt.counters import GCounter as GCounter
    from millstream.crdt.counters import PNCounter as PNCounter
    from millstream.crdt.hlc import HLC as HLC
    from millstream.crdt.registers import HideFlag as HideFlag
    from millstream.crdt.registers import LWWRegister as LWWRegister
    from millstream.crdt.sets import ObservedSet as ObservedSet
    from millstream.crdt.sets import UnionSet as UnionSet
    from millstream.crdt.signals import SignalState as SignalState

_PUBLIC = {
    "HLC": "hlc",
    "Actor": "counters",
    "GCounter": "counters",
    "HideFlag": "registers",
    "LWWRegister": "registers",
    "ObservedSet": "sets",
    "PNCounter": "counters",
    "SignalState": "signals",
    "UnionSet": "sets",
}

__all__ = [
    "HLC",
    "Actor",
    "GCounter",
    "HideFlag",
    "LWWRegister",
    "ObservedSet",
    "PNCounter",
    "SignalState",
    "UnionSet",
]


def __getattr__(name: str) -> object:
    try:
        module = _PUBLIC[name]
    except KeyError:
        raise AttributeError(f"module 'millstream.crdt' has no attribute {name!r}") from None
    value = getattr(importlib.import_module(f"millstream.crdt.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
