"""Numbers that server processes share, a cell for each process: its connections, bytes of requests, and if it drains.

A process writes its own cell before it reads the others', so that two that go for the last room at the same moment
can't both have it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from typing import Final, Literal, get_args

Total = Literal["connections", "held_bytes", "draining"]
_TOTALS: Final[tuple[Total, ...]] = get_args(Total)
_CELL_BYTES: Final = 8


class SharedTotals:
    """The totals of so many processes, in memory that they share.

    Args:
        descriptor: of a file as `make_file` makes it.
    """

    def __init__(self, descriptor: int, count: int) -> None:
        memory = mmap.mmap(descriptor, len(_TOTALS) * count * _CELL_BYTES)
        self._cells = memoryview(memory).cast("q")
        self._count = count

    def share_of(self, total: Total, number: int) -> Callable[[int], int]:
        """Return a function that publishes a process's own part of a total, and returns the others' parts together."""
        cells = self._cells
        start = _TOTALS.index(total) * self._count
        end, own = start + self._count, start + number

        def share(value: int) -> int:
            cells[own] = value
            return sum(cells[start:end]) - value

        return share

    def clear(self, number: int) -> None:
        """Forget the parts of a process that has ended."""
        for total in _TOTALS:
            self.share_of(total, number)(0)


def make_file(count: int) -> int:
    """Return the descriptor of a file for the totals of so many processes; it ends with its last holder."""
    with tempfile.TemporaryFile() as file:
        file.truncate(len(_TOTALS) * count * _CELL_BYTES)
        return os.dup(file.fileno())
