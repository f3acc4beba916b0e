"""The number up to which readers see everything: what the marks of all shards, and of all writers, show.

A commit group's records lie in several shards, whose marks move one after the other. Readers stop at the cut that all
of them show, so that they never see a part of a group or of a transaction. Pure: it reads no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from millstream.model.ids import ShardId, WriterId
from millstream.model.marks import DurableMark
from millstream.model.positions import SEQ_MAX, Seq


def common_cut(marks: Iterable[DurableMark]) -> Seq:
    """Return the greatest number up to which every mark of one writer shows everything; 0 without marks."""
    marks = list(marks)
    covered = min((mark.group for mark in marks), default=0)
    return Seq(max((mark.persisted_upto for mark in marks if mark.group == covered), default=0))


def left_behind(marks: Mapping[ShardId, DurableMark]) -> Iterator[tuple[ShardId, DurableMark]]:
    """Yield the marks of each writer's oldest group that show a lower number than that group's others, with that number.

    A kill between two moves leaves them so. They have to move before any position does: once a mark
    shows the next group, the number is taken from those that still show the oldest one.
    """
    for writer, cut in writer_cuts(marks.values()).items():
        own = {shard: mark for shard, mark in marks.items() if mark.writer == writer}
        oldest = min(mark.group for mark in own.values())
        for shard, mark in own.items():
            if mark.group == oldest and mark.persisted_upto < cut:
                yield shard, replace(mark, persisted_upto=cut)


def stream_cut(marks: Iterable[DurableMark]) -> Seq:
    """Return the greatest number up to which the marks of all of a stream's writers show everything.

    0 without marks.
    """
    by_writer = _by_writer(marks)
    cuts = _cuts(by_writer)
    living = [writer for writer, own in by_writer.items() if not all(mark.is_settled for mark in own)]
    # If no writer lives, the last to stop has seen most: the other marks' positions of other
    # folders are outdated.
    asked = living or [writer for writer, cut in cuts.items() if cut == max(cuts.values())]
    elsewhere = [_elsewhere(by_writer[writer]) for writer in asked]
    here = min((cuts[writer] for writer in asked), default=Seq(0))
    return min(here, (min if living else max)(elsewhere, default=SEQ_MAX))


def _elsewhere(own: Sequence[DurableMark]) -> Seq:
    return min((mark.elsewhere for mark in own if mark.elsewhere is not None), default=SEQ_MAX)


def writer_cuts(marks: Iterable[DurableMark]) -> dict[WriterId, Seq]:
    """Return, for each writer, the greatest number up to which all its marks show everything of its own."""
    return _cuts(_by_writer(marks))


def _cuts(by_writer: Mapping[WriterId, Sequence[DurableMark]]) -> dict[WriterId, Seq]:
    return {writer: common_cut(own) for writer, own in by_writer.items()}


def _by_writer(marks: Iterable[DurableMark]) -> dict[WriterId, list[DurableMark]]:
    found: dict[WriterId, list[DurableMark]] = {}
    for mark in marks:
        found.setdefault(mark.writer, []).append(mark)
    return found
