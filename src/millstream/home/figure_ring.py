"""A ring of figures on disk: samples of the last hour, day and week, in a file that never grows.

The file has a head and a place for each sample. A sample takes the place of the oldest of its period, has a checksum of its own,
and isn't synced: after a crash the last ones may be missing. A damaged sample is left out. A file whose head or size is wrong is
replaced by an empty one. `note` says both.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import structlog

from millstream.codec.checksums import crc32c
from millstream.private_files import make_folder, open_private, replace_file

logger = structlog.get_logger("millstream.serve")


@dataclass(frozen=True, slots=True)
class Period:
    """A time that samples are kept for."""

    name: str
    step_s: int
    """Seconds that one sample stands for."""
    samples: int


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that is sampled."""

    name: str
    title: str
    unit: Literal["records/s", "records", "seconds", "bytes"]
    takes: Literal["mean", "greatest", "least"] = "greatest"
    """How several samples become one of a longer step: a mean would hide a short delay."""


PERIODS: Final = {
    one.name: one for one in (Period("hour", 15, 240), Period("day", 300, 288), Period("week", 1800, 336))
}
_MAGIC: Final = b"MSFIGS01"
_CRC: Final = struct.Struct("<I")

Values: TypeAlias = tuple[float, ...]
"""A value for each figure; NaN for one that isn't known."""


class FigureRing:
    """The samples of one file. Not for several threads at a time.

    Raises:
        OSError: the file can be neither read nor made.
    """

    def __init__(self, path: Path, figures: Sequence[Figure]) -> None:
        self.path: Final = path
        self.note = ""
        """A text that names the samples which are missing because the file was damaged; empty if none are."""
        self._figures: Final = figures
        self._sample: Final = struct.Struct(f"<qI{len(figures)}f")
        layout = repr(([one.name for one in figures], list(PERIODS.values()))).encode()
        self._head: Final = _MAGIC + _CRC.pack(crc32c(layout))
        self._kept: dict[tuple[str, int], tuple[int, int, Values]] = {}
        """By period and place: the sample's start, how many samples it was made of, and its values."""
        make_folder(path.parent)
        self._load()
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    @property
    def _size(self) -> int:
        return len(self._head) + sum(one.samples for one in PERIODS.values()) * self._place_size

    @property
    def _place_size(self) -> int:
        return self._sample.size + _CRC.size

    def _places(self, period: Period) -> int:
        """Return where a period's places begin."""
        before = list(PERIODS.values())
        return len(self._head) + self._place_size * sum(one.samples for one in before[: before.index(period)])

    def _load(self) -> None:
        try:
            with open(self.path, "rb", opener=open_private) as file:
                data = file.read(self._size + 1)
        except FileNotFoundError:
            data = None
        if data is None or len(data) != self._size or not data.startswith(self._head):
            if data is not None:
                self._say("the file of the figures was damaged, or of another version: it was begun again")
            replace_file(self.path, self._head.ljust(self._size, b"\0"), durable=False)
            return
        damaged = 0
        for period in PERIODS.values():
            for place in range(period.samples):
                at = self._places(period) + place * self._place_size
                body = data[at : at + self._sample.size]
                if not any(data[at : at + self._place_size]):
                    continue
                start, count, *values = self._sample.unpack(body)
                (crc,) = _CRC.unpack_from(data, at + self._sample.size)
                if (
                    crc == crc32c(body)
                    and start % period.step_s == 0
                    and start // period.step_s % period.samples == place
                ):
                    self._kept[period.name, place] = (start, count, tuple(values))
                else:
                    damaged += 1
        if damaged:
            self._say(f"{damaged} damaged {'sample was' if damaged == 1 else 'samples were'} left out")

    def _say(self, note: str) -> None:
        self.note = note
        logger.warning(note, file=str(self.path))

    def add(self, at_s: float, values: Values) -> None:
        """Add a sample. Raises `OSError` if it can't be written; it is kept in memory even then."""
        written: OSError | None = None
        for period in PERIODS.values():
            start = int(at_s) // period.step_s * period.step_s
            place = start // period.step_s % period.samples
            had = self._kept.get((period.name, place))
            one = (
                (start, 1, values) if had is None or had[0] != start else (start, had[1] + 1, self._joined(had, values))
            )
            self._kept[period.name, place] = one
            body = self._sample.pack(one[0], min(one[1], 0xFFFF), *one[2])
            try:
                os.pwrite(self._file, body + _CRC.pack(crc32c(body)), self._places(period) + place * self._place_size)
            except OSError as error:
                written = error
        if written is not None:
            raise written

    def _joined(self, had: tuple[int, int, Values], values: Values) -> Values:
        _, count, before = had
        joined = []
        for figure, old, new in zip(self._figures, before, values, strict=True):
            if math.isnan(old) or math.isnan(new):
                joined.append(new if math.isnan(old) else old)
            elif figure.takes == "mean":
                joined.append((old * count + new) / (count + 1))
            else:
                joined.append(max(old, new) if figure.takes == "greatest" else min(old, new))
        return tuple(joined)

    def samples(self, period: Period, now_s: float) -> list[tuple[int, Values]]:
        """Return a period's samples up to a time, the oldest first: the start of each, and its values."""
        first = int(now_s) - period.step_s * period.samples
        found = ((start, values) for (name, _), (start, _, values) in self._kept.items() if name == period.name)
        return sorted(one for one in found if first < one[0] <= now_s)
