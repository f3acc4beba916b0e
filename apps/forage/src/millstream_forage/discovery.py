"""One discovery run: what the registry's sources hold enters the log, and the heartbeat says so."""

from __future__ import annotations

from dataclasses import dataclass

from millstream_forage.engine import ForageEngine
from millstream_forage.sources import Refused, Registry


@dataclass(frozen=True, slots=True)
class Discovered:
    """The outcome of a run."""

    added: int
    known: int
    """Items whose URL the log had before."""
    refused: list[Refused]
    """Entries that break a rule, and sources and files that can't be read."""
    next_run: int
    """When the next run is due, in nanoseconds since 1970."""


def discover(engine: ForageEngine, registry: Registry) -> Discovered:
    """Read every source once, add the items that keep the rules, and record the run.

    Raises:
        MillstreamError: the log can't be written; the items before it are added.
    """
    captured = registry.capture()
    answers = [engine.add_item(item) for item in captured.items]
    known = sum(answer.duplicate for answer in answers)
    return Discovered(len(answers) - known, known, captured.refused, engine.heartbeat().next_run)
