"""Misplaced segments: set aside, and put back if their place is empty and the chain of hashes agrees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from millstream.codec.log_segment import NO_HASH, SEGMENT_HEADER_SIZE, SegmentFooter, SegmentHeader
from millstream.errors import CorruptFrame, UnsupportedFormat
from millstream.model.ids import ShardId, StreamId
from millstream.model.positions import Offset
from millstream.ports import Files
from millstream.wal.durable_mark import read_dropped, read_mark
from millstream.wal.layout import SegmentFile, list_segments, segment_path, shard_folder
from millstream.wal.misplacement import split_misplaced
from millstream.wal.segment_scan import footer_of, header_of

_ASIDE: Final = "-misplaced"


@dataclass(frozen=True, slots=True)
class Move:
    """A segment's file that doesn't stay where it is."""

    shard: ShardId
    """Shard in whose folder it lies."""
    path: str
    target: str | None
    """Path where it belongs; None if it is only set aside, next to its present path."""
    why: str


@dataclass(frozen=True, slots=True)
class Placement:
    """The segments by their places, once the moves are done."""

    segments: dict[ShardId, list[SegmentFile]]
    """Segments by shard, each with the base offset at which it will lie, and its present path."""
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A segment that isn't in its own place."""

    folder_shard: ShardId
    path: str
    header: SegmentHeader
    why: str
    """Why it doesn't belong there; empty if it was set aside before."""


def place_segments(files: Files, folder: str, shards: Sequence[ShardId], stream: StreamId | None) -> Placement:
    """Decide which segments are moved. Changes nothing.

    Args:
        shards: all shards in it.
        stream: the log's stream; None if nothing names it.

    Raises:
        LogError (`unexpected_file`): a file lies there that isn't the log's.
    """
    placed: dict[ShardId, list[SegmentFile]] = {}
    candidates: list[_Candidate] = []
    for shard in shards:
        shard_dir = shard_folder(folder, shard)
        placed[shard], misplaced = split_misplaced(files, shard, list_segments(files, shard_dir), stream)
        candidates += (_Candidate(shard, segment.path, header, why) for segment, header, why in misplaced)
        candidates += _set_aside_before(files, shard, shard_dir)
    moves: list[Move] = []
    # In order, so that each finds the one before it.
    for found in sorted(candidates, key=lambda found: (found.header.shard, found.header.base_offset, found.path)):
        shard, base = found.header.shard, found.header.base_offset
        fits = shard in placed and found.header.stream == stream and _fits(files, folder, placed[shard], found)
        if fits:
            placed[shard] = sorted([*placed[shard], SegmentFile(base, found.path)])
            target = segment_path(shard_folder(folder, shard), base)
            moves.append(Move(found.folder_shard, found.path, target, found.why or "its place is empty"))
        elif found.why:
            moves.append(Move(found.folder_shard, found.path, None, found.why))
    return Placement(placed, tuple(moves))


def move_segments(files: Files, moves: Iterable[Move]) -> list[str]:
    """Move the files. A repair that is cut short finds the files that were set aside, and continues.

    Returns:
        The files that stay aside.

    Raises:
        OSError: the disk failed; what was renamed stays so.
    """
    aside: list[tuple[str, str | None]] = []
    folders: set[str] = set()
    for move in moves:
        path = move.path
        if path.endswith(".wal"):
            path = _free_name(files, path.removesuffix(".wal"))
            files.rename(move.path, path)
            folders.add(_folder(path))
        aside.append((path, move.target))
    for folder in sorted(folders):
        files.sync_dir(folder)
    folders.clear()
    for path, target in aside:
        if target is not None:
            files.rename(path, target)
            folders |= {_folder(path), _folder(target)}
    for folder in sorted(folders):
        files.sync_dir(folder)
    return [path for path, target in aside if target is None]


def _folder(path: str) -> str:
    return path.rsplit("/", 1)[0]


def _free_name(files: Files, stem: str) -> str:
    name, number = f"{stem}{_ASIDE}.torn", 1
    while files.exists(name):
        number += 1
        name = f"{stem}{_ASIDE}-{number}.torn"
    return name


def _set_aside_before(files: Files, shard: ShardId, shard_dir: str) -> Iterator[_Candidate]:
    for name in files.listdir(shard_dir):
        if _ASIDE in name and name.endswith(".torn"):
            path = f"{shard_dir}/{name}"
            try:
                header = SegmentHeader.decode(files.read(path, 0, SEGMENT_HEADER_SIZE))
            except (CorruptFrame, UnsupportedFormat):
                continue
            yield _Candidate(shard, path, header, "")


def _fits(files: Files, folder: str, placed: Sequence[SegmentFile], found: _Candidate) -> bool:
    """Return whether the place that a header names is empty, and the segments on both sides of it agree."""
    header = found.header
    shard_dir = shard_folder(folder, header.shard)
    base = header.base_offset
    mark, dropped = read_mark(files, shard_dir), read_dropped(files, shard_dir)
    if dropped is not None and base < dropped.offset:
        return False
    footer = footer_of(files, SegmentFile(base, found.path))
    sealed = isinstance(footer, SegmentFooter)
    if not sealed and (placed and placed[-1].base_offset > base):
        return False
    if mark is not None and (base > mark.base_offset or (not sealed and base != mark.base_offset)):
        return False
    end = footer.end_offset if isinstance(footer, SegmentFooter) else Offset(base + 1)
    if any(base <= segment.base_offset < end for segment in placed):
        return False
    if base == 0 and header.previous_hash != NO_HASH:
        return False
    before = next((segment for segment in reversed(placed) if segment.base_offset < base), None)
    if before is not None:
        footer_before = footer_of(files, before)
        if isinstance(footer_before, SegmentFooter) and (
            footer_before.end_offset > base
            or (footer_before.end_offset == base and footer_before.footer_hash != header.previous_hash)
        ):
            return False
    behind = next((segment for segment in placed if segment.base_offset == end), None)
    if behind is not None and isinstance(footer, SegmentFooter):
        header_behind = header_of(files, behind)
        return header_behind is None or header_behind.previous_hash == footer.footer_hash
    return True
