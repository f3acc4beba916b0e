"""Appends that still wait for other machines when their writer hands the log to another process of this machine.

They don't need that writer: the process that ships the log reports what the others hold
(`HighWater`), and the new writer shows readers what they may see (the marks). So each append waits
on until its deadline. It delays no one: the locks and the next writer don't depend on it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from millstream.errors import LogError
from millstream.model.ids import GroupNumber
from millstream.model.operations import Ack
from millstream.model.positions import Seq
from millstream.model.replication import AckLevel, Holdings
from millstream.ports import HighWater
from millstream.wal.writing.waiters import Outcome, Waiting, answer

logger = structlog.get_logger("millstream.wal")

_LOOK_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class HandedOver:
    """One append that waits."""

    waiting: Waiting
    ack: Ack
    level: AckLevel
    until_s: float
    """Deadline, by `time.monotonic`."""
    group: GroupNumber
    """Last group that must be held."""
    upto: Seq | None
    """For a repeated write, whose outcome is only reported again: the number that must be held."""

    def is_held(self, holdings: Holdings) -> bool:
        """Return whether the other machines hold it."""
        return self.group <= holdings.group_reached(self.level) or (
            self.upto is not None and self.upto <= holdings.seq_reached(self.level)
        )

    @property
    def last(self) -> Seq:
        """Number that readers must be shown."""
        return self.upto or (self.ack.seqs.last if self.ack.seqs.count else Seq(0))


def wait_elsewhere(
    left: Sequence[HandedOver],
    high_water: HighWater,
    *,
    last_seen: Holdings,
    shown_upto: Callable[[], Seq] | None,
    missing: Callable[[HandedOver, Holdings, str], Exception],
) -> None:
    """Start a thread that answers each append once others hold it and readers see it, or with an error.

    The error comes when its deadline passes, or when another node leads: the outcome is then
    unknown. This call returns at once.

    Args:
        left: the appends that wait.
        high_water: reports what the others hold; only this thread polls it from here on.
        last_seen: its last report: the next one may belong to another leader's history.
        shown_upto: returns the number up to which readers see the log; None if they see everything
            durable.
        missing: makes the error of an append that isn't held, from what the others hold and the
            reason why it waits no longer.
    """
    if left:
        work = _Waits(list(left), high_water, last_seen, shown_upto, missing)
        threading.Thread(target=work.run, name="wal-levels-handed-over", daemon=True).start()


class _Waits:
    def __init__(
        self,
        left: list[HandedOver],
        high_water: HighWater,
        last_seen: Holdings,
        shown_upto: Callable[[], Seq] | None,
        missing: Callable[[HandedOver, Holdings, str], Exception],
    ) -> None:
        self._left = left
        self._high_water = high_water
        self._shown_upto = shown_upto
        self._missing = missing
        self._holdings = last_seen

    def run(self) -> None:
        try:
            while self._left:
                self._step()
                time.sleep(_LOOK_S)
        except Exception as error:  # our bug: no other thread would ever answer them
            answer([(one.waiting, error) for one in self._left])
            raise

    def _step(self) -> None:
        before, shown = self._holdings, Seq(0)
        try:
            self._holdings = holdings = self._high_water.look()
            shown = Seq(0) if self._shown_upto is None else self._shown_upto()
        except (LogError, OSError):
            holdings = Holdings()  # the file may be half written, or just begun: the next poll reads it
        is_led_anew = bool(before.places) and self._holdings.promised != before.promised
        now = time.monotonic()
        told: list[tuple[Waiting, Outcome]] = []
        waits: list[HandedOver] = []
        for one in self._left:
            if is_led_anew:
                # Numbers and groups may belong to another history from here on.
                told.append((one.waiting, self._missing(one, before, "another node has led since")))
            elif one.is_held(holdings) and (self._shown_upto is None or one.last <= shown):
                told.append((one.waiting, one.ack))
            elif one.until_s <= now:
                told.append((one.waiting, self._missing(one, holdings, "the append's deadline is over")))
            else:
                waits.append(one)
        self._left = waits
        answer(told)
