"""The configuration of capture of one stream, its progress, and its outcome."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from millstream.errors import MillstreamError
from millstream.model.column_rules import SourceRules
from millstream.model.ids import ShardId
from millstream.model.operations import FIRST_SHARD
from millstream.model.positions import Lsn
from millstream.protocol.catch_up_mode import CHUNK_CHANGES, CHUNK_WAL_BYTES, START_BYTES, CatchUpMode, Mode


def one_shard(table: str) -> ShardId:
    """Put every table on the first shard."""
    del table
    return FIRST_SHARD


def no_limit() -> int | None:
    """Return no limit: copy as fast as possible."""
    return None


def free_bytes_of(folder: Path) -> int:
    """Return the free space of a folder's disk."""
    return shutil.disk_usage(folder).free


def no_moment(name: str, details: Mapping[str, Any]) -> None:
    """Pass a moment of capture without doing anything."""
    del name, details


CHUNK_ROWS: Final = 50_000  # some 5 MiB of common rows: small next to memory, large next to a round trip
BUFFER_BYTES_MAX: Final = 32 << 20
RUN_BYTES_MAX: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class CaptureConfig:
    """Capture of one stream from one database.

    Attributes:
        stream: the stream's name.
        dsn: the source's address; its secrets never appear in a message.
        tables: patterns (see `millstream.model.names`).
        publication: publication of tables with a usable identity; `<publication>_inserts` has the others.
        slot: the replication slot's name.
        failover: whether a created slot is a failover slot, which standbys keep a copy of (PostgreSQL 17 and newer).
        origin: `any`, or `none`: leave out what replication from another system wrote (PostgreSQL 16 and newer).
        spill_dir: a folder of this stream's own for transactions that are too large for memory; emptied at start.
        shard_of: the shard of a table, by `schema.name`; asked once, when the table is new.
        copy_workers: number of connections that read existing rows in parallel.
        chunk_rows: most rows in a chunk of a table copy.
        copy_rate: bytes a second that all copies together may read; None: as fast as possible. Called every second.
        follows_names: whether the stream waits for a look at the source's catalogs that shows which columns unexpected ones
            are, so that the lake reads older rows under the new names, and with the defaults of new columns.
        copies_renamed: whether a renamed column is copied again all the same: a lake in PostgreSQL reads by names.
        copy_again_above: size in bytes of a table above which another copy of it waits for an operator; None: never.
        buffer_bytes_max: undecoded bytes held in memory; the source waits beyond it.
        heartbeat_s: how often an idle source gets a heartbeat message.
        look_s: how often the source's catalogs and the states of tables are read.
        status_s: longest time between reports to the source of how far the log is.
        give_up_s: how long `until_caught_up` goes on without a connection, or on a full disk.
        others_s: how long an ending session waits until other machines have its durable operations, if the stream asks
            for that.
        shipped_within_s: time in which copies of the catalog come to the stream's other nodes; 0 if there are none.
        plain_turns: how often a table without a key is read without holding the stream: enough for one that is written to
            now and then.
        free_patience_s: how long to wait for a snapshot while nothing waits for it; then it is requested again.
        held_patience_s: how long the stream is held at first for a snapshot to come; a standby's takes longer.
        put_off_s: how long a copy without space or without a free slot waits before it is tried again.
        catch_up: whether a large backlog may be read in chunks.
        catch_up_bytes: how much WAL makes a backlog large.
        catch_up_changes: number of changes in a chunk of the backlog, about.
        catch_up_chunk_bytes: WAL in a chunk of the backlog, about.
        free_bytes: returns the free space of the disk of a folder, `spill_dir`.
        run_bytes_max: bytes of whole transactions from which on they are handed on together.
        slot_advance_s: how often the slot is advanced, at most, while a backlog is read in chunks.
        reads_socket: whether machine code may read the source's messages from an unencrypted socket; else libpq does.
        on_moment: called at named moments, with facts about them, on the thread that passes them, which waits for it and
            raises what it raises. Tests delay and fail steps there.
        slot_lag_bytes: WAL from which on `doctor` reports that the slot holds it.
        rules: columns whose values never leave the source.
        lake_types: types that the lake is asked for, by `schema.table.column`. Capture stores the source's; `doctor` compares
            them with the source's columns.
    """

    stream: str
    dsn: str = field(repr=False)
    tables: tuple[str, ...]
    publication: str
    slot: str
    spill_dir: str
    shard_of: Callable[[str], ShardId] = one_shard
    copy_workers: int = 2
    chunk_rows: int = CHUNK_ROWS
    copy_rate: Callable[[], int | None] = no_limit
    follows_names: bool = False
    copies_renamed: bool = False
    copy_again_above: int | None = None
    buffer_bytes_max: int = BUFFER_BYTES_MAX
    heartbeat_s: float = 10.0
    look_s: float = 3.0
    status_s: float = 10.0
    give_up_s: float = 120.0
    others_s: float = 5.0
    shipped_within_s: float = 0.0
    plain_turns: int = 2
    free_patience_s: float = 120.0
    held_patience_s: float = 2.0
    put_off_s: float = 10.0
    catch_up: CatchUpMode = CatchUpMode.AUTO
    catch_up_bytes: int = START_BYTES
    catch_up_changes: int = CHUNK_CHANGES
    catch_up_chunk_bytes: int = CHUNK_WAL_BYTES
    failover: bool = True
    origin: str = "any"
    free_bytes: Callable[[Path], int] = free_bytes_of
    run_bytes_max: int = RUN_BYTES_MAX
    slot_advance_s: float = 10.0
    reads_socket: bool = True
    on_moment: Callable[[str, Mapping[str, Any]], None] = no_moment
    slot_lag_bytes: int = 4 << 30
    rules: SourceRules = field(default_factory=SourceRules)
    lake_types: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CaptureProgress:
    """The state of capture, reported about once a second."""

    received: Lsn
    """LSN up to which the source's WAL is read …"""
    durable: Lsn
    """… and up to which it is durable in the log."""
    source_end: Lsn
    """The end of the source's WAL, as last reported."""
    records: int
    """Number of records made durable by this run."""
    copies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By table being copied: `state` (`waiting`, `preparing`, `reading`, `paused`, `copy_held`), `rows`, `rows_estimate`,
    `bytes`, `rows_per_s`, `bytes_per_s`, `eta_s`, `ranges`, `ranges_done`, `holds_stream` (whether the stream waits for it);
    None for unknown values."""
    mode: Mode = Mode.STREAMING
    """How the source is read."""
    slot_holds_bytes: int | None = None
    """WAL that the slot keeps at the source, when it was last read."""
    source_spilled_bytes: int | None = None
    """Bytes that decoding for the slot has spilled to the source's disk since its statistics began."""


@dataclass(frozen=True, slots=True)
class CaptureOutcome:
    """How capture ended."""

    reached: Lsn
    """The commit end LSN up to which everything is durable; the slot is confirmed there."""
    caught_up: bool
    """Whether the target of `until_caught_up` was met."""
    tables: tuple[str, ...]
    """Tables captured, `schema.name`."""
    paused: tuple[str, ...] = ()
    """Tables whose copies are paused: capture didn't wait for them."""
    copies_held: Mapping[str, str] = field(default_factory=dict)
    """Tables whose copies wait for `millstream tables copy`, each with the reason."""
    quarantined: Mapping[str, str] = field(default_factory=dict)
    """Quarantined tables, each with its reason."""
    slot: str = ""
    """The slot that the source keeps WAL for; empty if it has none of ours, or capture never got to it."""
    slot_holds_bytes: int | None = None
    """WAL that the slot keeps at the source, if it could be read."""
    error: MillstreamError | None = None
