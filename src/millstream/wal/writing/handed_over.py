"""Appends that wait for other machines still, when the writer that made them durable gives the log to another process of this machine.

What they wait for goes on without that writer: who ships the log tells what others hold (`HighWater`), and whoever writes now shows readers what they may see
(the marks). So each goes on waiting until its deadline, and holds nobody up: neither the locks nor the next writer know of it.
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
    """One that waits."""

    waiting: Waiting
    ack: Ack
    level: AckLevel
    until_s: float
    """By `time.monotonic`."""
    group: GroupNumber
    """The last that must be held."""
    upto: Seq | None
    """Of what was written before, and is only told again: the number that must be held."""

    def is_held(self, holdings: Holdings) -> bool:
        """Whether others hold it."""
        return self.group <= holdings.group_reached(self.level) or (
            self.upto is not None and self.upto <= holdings.seq_reached(self.level)
        )

    @property
    def last(self) -> Seq:
        """The number that readers must be shown."""
        return self.upto or (self.ack.seqs.last if self.ack.seqs.count else Seq(0))


def wait_elsewhere(
    left: Sequence[HandedOver],
    high_water: HighWater,
    *,
    last_seen: Holdings,
    shown_upto: Callable[[], Seq] | None,
    missing: Callable[[HandedOver, Holdings, str], Exception],
) -> None:
    """Return, and answer each once others hold it and readers see it, or its deadline is over; or another node leads, so that nobody can say any more.

    Args:
        left: those that wait.
        high_water: tells what others hold; nobody else looks at it from here on.
        last_seen: what it told last: what it tells next may be of another leader's history.
        shown_upto: up to which number readers see the log; None where they see all that is durable.
        missing: the error of one that isn't held, of what others hold, and why it waits no more.
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
        except Exception as error:  # our bug: nobody else would ever answer them
            answer([(one.waiting, error) for one in self._left])
            raise

    def _step(self) -> None:
        before, shown = self._holdings, Seq(0)
        try:
            self._holdings = holdings = self._high_water.look()
            shown = Seq(0) if self._shown_upto is None else self._shown_upto()
        except (LogError, OSError):
            holdings = Holdings()  # it may be just written, or begun: the next look tells
        is_led_anew = bool(before.places) and self._holdings.promised != before.promised
        now = time.monotonic()
        told: list[tuple[Waiting, Outcome]] = []
        waits: list[HandedOver] = []
        for one in self._left:
            if is_led_anew:
                # Numbers and groups may be another history's from here on.
                told.append((one.waiting, self._missing(one, before, "another node has led since")))
            elif one.is_held(holdings) and (self._shown_upto is None or one.last <= shown):
                told.append((one.waiting, one.ack))
            elif one.until_s <= now:
                told.append((one.waiting, self._missing(one, holdings, "the append's deadline is over")))
            else:
                waits.append(one)
        self._left = waits
        answer(told)
