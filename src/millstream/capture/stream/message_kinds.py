"""Kinds of the messages in the replication stream, and the marks by which whole blocks of messages are divided."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

BEGIN, COMMIT = ord("B"), ord("C")
STREAM_START, STREAM_STOP, STREAM_COMMIT, STREAM_ABORT = ord("S"), ord("E"), ord("c"), ord("A")

Marks = npt.NDArray[np.uint8]
NOT_ORDINARY: Final = 1
NOT_STREAMED: Final = 2
NOT_WHOLE: Final = 4
MAY_END: Final = 8


def _marks() -> Marks:
    """Return by kind of message: which runs it ends, and whether a transaction may end with it."""
    marks = np.zeros(256, dtype=np.uint8)
    for kinds, mark in (
        (b"kSEcA", NOT_ORDINARY),
        (b"kSEcARY", NOT_STREAMED),
        (b"kCSEcA", NOT_WHOLE),
        (b"CM", MAY_END),
    ):
        for kind in kinds:
            marks[kind] |= mark
    return marks


MARKS: Final = _marks()
"""The marks of a message by its kind."""


def next_marked(marks: Marks, mark: int, at: int) -> int:
    """Return the index of the first message from `at` on that has the mark; the number of messages if none has."""
    found = np.flatnonzero(marks[at:] & mark)
    return at + int(found[0]) if len(found) else len(marks)
