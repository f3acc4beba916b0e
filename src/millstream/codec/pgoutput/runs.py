"""A run of messages in one piece of memory: the input of `transaction_decoder`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

_NONE: Final = np.empty(0, dtype=np.int64)


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
        """Make a run of messages as they came, each behind a header of `header_bytes` (25 for XLogData)."""
        buffer = np.frombuffer(b"".join(messages), dtype=np.uint8)
        ends = np.cumsum(np.fromiter(map(len, messages), dtype=np.int64, count=len(messages)), dtype=np.int64)
        starts = np.empty_like(ends)
        if len(ends):
            starts[0] = 0
            starts[1:] = ends[:-1]
        return cls(buffer, starts + header_bytes, ends)

    @classmethod
    def joined(cls, runs: Sequence[MessageRun]) -> MessageRun:
        """Concatenate several runs; the bytes are copied only if they lie in several buffers."""
        if len(runs) == 1:
            return runs[0]
        if all(run.buffer is runs[0].buffer for run in runs):
            starts, ends = [run.starts for run in runs], [run.ends for run in runs]
            return cls(runs[0].buffer, np.concatenate(starts), np.concatenate(ends))
        pieces = [run for run in runs if len(run)]
        spans = [run.buffer[run.starts[0] : run.ends[-1]] for run in pieces]
        buffer = np.concatenate(spans) if spans else np.empty(0, dtype=np.uint8)
        buffer.flags.writeable = False  # one kind of array, one piece of machine code
        places = np.cumsum([0, *(len(span) for span in spans)])[: len(pieces)].tolist()
        shifts = [place - int(run.starts[0]) for place, run in zip(places, pieces, strict=True)]
        return cls(
            buffer,
            np.concatenate([_NONE, *(run.starts + shift for run, shift in zip(pieces, shifts, strict=True))]),
            np.concatenate([_NONE, *(run.ends + shift for run, shift in zip(pieces, shifts, strict=True))]),
        )

    @property
    def span_bytes(self) -> int:
        """Bytes from the first message's start to the last one's end, including any gaps."""
        return int(self.ends[-1] - self.starts[0]) if len(self.ends) else 0

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, number: int) -> bytes:
        """Return one message."""
        return self.buffer[self.starts[number] : self.ends[number]].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        data = self.buffer.tobytes()
        for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True):
            yield data[start:end]
