"""`restore`: brings a stream back from an object store alone, into a home of its own."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import PositionError, ShipmentUnreadable, TokenFromFuture, UnknownStream, UsageError
from millstream.home.home import Home
from millstream.home.paths import FILE_NAME
from millstream.leadership.node_roles import Roles
from millstream.model.as_of_parsing import is_token, microseconds, parse_as_of, parse_moment
from millstream.model.ids import Epoch, GroupNumber, RegionId, check_stream_name
from millstream.model.positions import Seq
from millstream.nodes.catalog_document import CATALOG, adopt_catalog
from millstream.nodes.consumers_document import take_consumers
from millstream.nodes.object_stores import FetchedStream, fetch
from millstream.private_files import make_folder, replace_file
from millstream.protocol.replication.node_promises import CONSUMERS, SESSIONS, RoleFact
from millstream.replication.object_store.transport import ObjectStoreTransport
from millstream.wal.files import RealFiles
from millstream.wal.layout import SESSIONS_NAME
from millstream.wal.reader import StreamReader
from millstream.wal.replica.prepare_promotion import prepare_promotion
from millstream.wal.replica.set_aside import ends_behind, last_group_upto, truncate_to
from millstream.wal.replica.ship_source import durable_marks
from millstream.wal.writing.session_file import covered_in

if TYPE_CHECKING:
    from millstream.model.ids import StreamId
    from millstream.model.positions import StreamToken
    from millstream.model.replication import Document

_ONE_REGION: Final = RegionId(0)
_BEGUN: Final = "restoring.json"
"""File that names the stream being restored; it exists until the restore is done."""


def restore_stream(
    url: str,
    stream: str,
    folder: Path,
    *,
    region: RegionId = _ONE_REGION,
    at: str | None = None,
    epoch: int | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Bring a stream back from an object store.

    Args:
        folder: a home to make, or one that an interrupted call has begun. It gets a millstream.toml if it
            has none.
        region: the region whose log to restore, if several regions write the stream.
        at: a token of the stream, or a moment: later records aren't restored. A moment cuts before the
            first commit group that has a commit after it. None: everything.
        epoch: the log as it was under that epoch, if a leader with a higher one was promoted without the
            store and has continued from below; None: the log.

    Returns:
        `stream`, `id`, `persisted_upto`, `token`, `group`, `bytes`: JSON-able.

    Raises:
        UsageError: the folder has something else, or was fully restored already; or the store's address
            is invalid.
        UnknownStream: the store has nothing of that name.
        PositionError (`invalid_token`), TokenFromFuture: the token is another stream's, or lies beyond what is stored.
        PositionError (`invalid_time`, `time_from_future`): it is neither a token nor a moment, or lies in the future.
        ShipmentUnreadable (`store_damaged`): objects are damaged, and not everything requested lies before them.
        StoreUnavailable, ShipmentUnreadable, DiskFull …: the restore can be started again, and continues
            where it was.
    """
    check_stream_name(stream)
    now = datetime.now(UTC)
    if at is not None and not is_token(at) and parse_moment(at, now=now) > now:
        raise PositionError(f"{at} lies in the future", code="time_from_future", hint=f"It is {now.isoformat()} now.")
    folder = folder.expanduser().absolute()
    begun = folder / "data" / _BEGUN
    _check_folder(folder, begun, stream)
    upto = None if epoch is None else Epoch(epoch)
    with contextlib.closing(ObjectStoreTransport(url, stream, region=region, node="restore", upto=upto)) as store:
        aside = store.set_aside()
        _check_epoch(upto, aside)
        marks = store.newest().marks
        if not marks:  # before a folder is made, which a mistyped name would leave behind
            of_region = f" in region {region}" if region else ""
            raise UnknownStream(
                f"{url} has nothing of stream {stream}{of_region}",
                hint="Check the address ([replication] object_store of the stream's nodes), the stream's name, and --region "
                "if several regions write it.",
                stream=stream,
            )
        stream_id = next(iter(marks.values())).stream
        asked = None if at is None else parse_as_of(at, stream_id, now=now)
        home = _home_at(folder, begun, stream, region)
        wal, replication = home.wal_folder(stream), home.data / "replication" / stream
        found = fetch(store, stream, wal, past_damage=True, beside_leader=True, tell=tell)
        if upto is None and aside:
            tell(
                "the store also has what a promotion without it has set aside: "
                + ", ".join(f"--epoch {one}" for one in aside)
            )
    if found.damage and asked is None:
        raise _damaged(found, wal)
    prepare_promotion(str(wal))
    if asked is not None:
        _cut_at(wal, _last_number(asked, wal, found), replication)
    sessions = found.documents.get(SESSIONS)
    if sessions is not None and (covered_in(sessions.data) or Seq(0)) <= StreamReader(str(wal)).persisted_upto():
        replace_file(wal / SESSIONS_NAME, sessions.data)
    here = durable_marks(RealFiles(), str(wal))
    # Also the numbers beyond what is restored: damaged objects existed once.
    reserved = max(mark.reserved_to for mark in (*marks.values(), *here.values()))
    _adopt(home, stream, stream_id, found.documents, reserved, is_cut=asked is not None)
    group = max((mark.group for mark in here.values()), default=GroupNumber(0))
    with Roles(home).changing(stream) as changing:
        # It leads what it has; nodes that continued from another point have their own lineage.
        lineage = found.lineage.covered_by(group)
        changing.put(RoleFact(lineage=lineage, promise=found.lineage.last.promise))
    # From here on it is a home like any other, and nothing is restored into it again.
    begun.unlink()
    RealFiles().sync_dir(str(begun.parent))
    reader = StreamReader(str(wal))
    return {
        "stream": stream,
        "id": str(stream_id),
        "persisted_upto": int(reader.persisted_upto()),
        "token": str(reader.token()),
        "group": int(group),
        "bytes": found.size_bytes,
    }


def _check_epoch(epoch: Epoch | None, aside: tuple[Epoch, ...]) -> None:
    if epoch is not None and epoch not in aside:
        raise UsageError(
            f"nothing that was stored under epoch {epoch} is set aside",
            hint=f"Epochs with more than the log has: {', '.join(map(str, aside)) or 'none'}. Without --epoch the log is restored.",
        )


def _check_folder(folder: Path, begun: Path, stream: str) -> None:
    if folder.exists() and any(folder.iterdir()) and not begun.exists():
        raise UsageError(
            f"{folder} isn't empty", hint="Name a new folder: the restored stream becomes a separate home."
        )
    if begun.exists() and json.loads(begun.read_bytes()).get("stream") != stream:
        raise UsageError(f"{folder} was begun for another stream", hint="Name a new folder.")


def _home_at(folder: Path, begun: Path, stream: str, region: RegionId) -> Home:
    make_folder(begun.parent)
    replace_file(begun, json.dumps({"stream": stream}).encode() + b"\n")
    if not (folder / FILE_NAME).exists():
        replace_file(
            folder / FILE_NAME,
            "# Restored from an object store. Put in what the stream had: its source, its keys, its lake.\n"
            f"[streams.{stream}]\n{f'region = {region}{chr(10)}' if region else ''}".encode(),
        )
    home = Home(folder, needs_source=False)
    home.prepare()
    return home


def _last_number(asked: datetime | StreamToken, wal: Path, found: FetchedStream) -> Seq:
    """Return the last number to restore.

    `store_damaged` and `TokenFromFuture` if it isn't there, `UsageError` if nothing is.
    """
    persisted = found.end.persisted_upto
    if isinstance(asked, datetime):
        reader = StreamReader(str(wal))
        upto = reader.numbers_at(microseconds(asked) + 1)[0]
        if upto >= persisted and found.damage:
            raise _damaged(found, wal)  # the damaged part may have been committed before the moment, too
        if upto < reader.first_seq():
            raise UsageError(
                f"everything that the store has of the stream was committed after {asked.isoformat()}",
                hint="Name a later moment; without --at everything is restored.",
            )
        return upto
    token = asked.linear()
    if token > persisted:
        if found.damage:
            raise _damaged(found, wal)
        raise TokenFromFuture(f"the store has the stream up to number {persisted}; the token says {token}")
    return token


def _damaged(found: FetchedStream, wal: Path) -> ShipmentUnreadable:
    """Return the error if damage prevents a requested restore: it names what is damaged, what isn't, and what to do."""
    first, *others = found.damage
    more = f" (and {len(others)} more)" if others else ""
    upto = found.end.persisted_upto if found.end.group else Seq(0)
    whole, token, how = "nothing in front of it can be restored", None, ""
    if upto:
        token = str(StreamReader(str(wal)).token())
        whole = f"what lies in front of it is whole up to number {upto}, token {token}"
        how = f" To do without what is behind the damage, restore with --at {token} into the same folder."
    return ShipmentUnreadable(
        f"{first.message}{more}; {whole}",
        code="store_damaged",
        hint="Run `millstream scrub` at a node that still has these bytes in its log, or restore the object from an "
        f"older version or a copy of the store; then repeat this command, which continues where it stopped.{how}",
        **{
            **first.details,
            "token": token,
            "persisted_upto": int(upto),
            "damaged": [one.details["object"] for one in found.damage],
        },
    )


def _cut_at(wal: Path, token: Seq, replication: Path) -> None:
    """Remove everything after a token from the log."""
    files, aside = RealFiles(), replication / "behind-token"
    group = last_group_upto(files, str(wal), token)
    make_folder(replication)
    truncate_to(str(wal), ends_behind(files, str(wal), group), aside=str(aside), files=files)
    shutil.rmtree(aside, ignore_errors=True)


def _adopt(
    home: Home, name: str, stream: StreamId, documents: Mapping[str, Document], reserved: Seq, *, is_cut: bool
) -> None:
    """Adopt the leader's newest catalog and consumers, and never reuse a number that the leader may have given out.

    If the log was cut, that catalog may have a position of the source beyond it. Capture would go on there.
    """
    catalog, consumers = documents.get(CATALOG), documents.get(CONSUMERS)
    if catalog is not None:
        adopt_catalog(home, catalog.data, [stream])
    with home.open_catalog() as known:
        known.resolve_stream(name, found=stream)
        if is_cut:
            known.require_reached(stream)
        _, epoch = known.register_writer(stream)
        known.reservations(stream).reserve_to(reserved, epoch=epoch)
        if consumers is not None:
            take_consumers(home, known, stream, name, consumers.data, None)
