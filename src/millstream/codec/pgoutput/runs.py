"""A run of messages in one piece of memory: what the vectorised decoder reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class MessageRun:
    """Many messages in one buffer of less than 2 GiB; message i is `buffer[starts[i]:ends[i]]`."""

    buffer: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        assert len(self.buffer) < 2**31, "runs are bounded by their makers"
        assert len(self.starts) == len(self.ends)

    @classmethod
    def of(cls, messages: Sequence[bytes], *, header_bytes: int = 0) -> Self:
        """A run of messages as they came, each with `header_bytes` before it that aren't its own (25 of XLogData)."""
        buffer = np.frombuffer(b"".join(messages), dtype=np.uint8)
        ends = np.cumsum(np.fromiter(map(len, messages), dtype=np.int64, count=len(messages)), dtype=np.int64)
        starts = np.empty_like(ends)
        if len(ends):
            starts[0] = 0
            starts[1:] = ends[:-1]
        return cls(buffer, starts + header_bytes, ends)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, number: int) -> bytes:
        """One message."""
        return self.buffer[self.starts[number] : self.ends[number]].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        data = self.buffer.tobytes()
        for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True):
            yield data[start:end]
