"""`slot drop`: drops a stream's replication slot at the source, also one that the configuration no longer names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from millstream.cli.context import (
    Invocation,
    SuggestingGroup,
    confirm,
    note,
    pass_invocation,
    stream_option,
)
from millstream.errors import UsageError
from millstream.model.human_text import human_bytes
from millstream.model.names import quote

if TYPE_CHECKING:
    from collections.abc import Iterable

    from millstream.capture.noted_slots import NotedSlot
    from millstream.catalog import Catalog, StreamRow
    from millstream.home.home import Home


@click.group(cls=SuggestingGroup)
def slot() -> None:
    """Manage the replication slot at the source."""


@slot.command("drop")
@stream_option
@click.option(
    "--slot",
    "slot_named",
    metavar="NAME",
    help="A slot that the stream has left at its source: millstream.toml no longer has the stream, or gives it another slot.",
)
@click.option(
    "--source",
    metavar="DSN",
    help="The database of a left slot, as it was in millstream.toml, variables included.  [default: found among the streams' sources]",
)
@click.option("--yes", is_flag=True, help="Don't ask for confirmation.")
@pass_invocation
def slot_drop(
    invocation: Invocation, stream: str | None, slot_named: str | None, source: str | None, yes: bool
) -> None:
    """Drop a stream's slot, to free the source's disk.

    Later changes are not captured; the next run copies every table again. If millstream.toml no
    longer has the stream, or has another slot for it, the publications that Millstream made for the
    left slot are dropped too. The log keeps its records.
    """
    from millstream.capture.source_table_checks import drop_slot
    from millstream.home.config_mapping import capture_config
    from millstream.writers.stall_reasons import forget_given_up

    home = invocation.home()
    is_left = slot_named is not None or source is not None or (stream is not None and home.configured(stream) is None)
    if is_left and home.has_catalog():
        _drop_left(home, stream, slot_named, source, yes=yes)
        return
    name, stream_config = home.stream_config(stream)
    capture = capture_config(home, name, stream_config)
    confirm(f"Drop the slot {capture.slot}? The next run will copy every table of {name} again", yes=yes)
    home.prepare()
    with home.open_catalog() as catalog:
        catalog.resolve_stream(name)
        held = drop_slot(capture, catalog)
        forget_given_up(catalog, name, "capture")
    note(_dropped_words(capture.slot, held))
    note("Its publications stay for the next run. If there will be none, run at the source:")
    _note_publications((capture.publication, f"{capture.publication}_inserts"))


def _drop_left(home: Home, named: str | None, slot_named: str | None, source: str | None, *, yes: bool) -> None:
    """Drop the slots that a stream has left, or one of them, with their publications."""
    from millstream.capture.noted_slots import forget_slot
    from millstream.capture.slot_removal import remove_slot
    from millstream.model.ids import default_name
    from millstream.writers.left_slots import left_slots
    from millstream.writers.stall_reasons import forget_given_up

    home.prepare()
    with home.open_catalog() as catalog:
        stream = home.pick_stream(named, of=[one.name for one in catalog.streams()])
        row = catalog.stream(stream)
        left = [one for one in left_slots(home, catalog, row.id) if slot_named in {None, one.slot}]
        if not left:
            raise UsageError(
                f"stream {stream} has left no slot {slot_named or ''}".rstrip(),
                hint="`millstream status` names the slots that streams have left at their sources.",
            )
        configured = home.config.streams.items()
        in_use = {one.source.publication or default_name(name) for name, one in configured if one.source is not None}
        dsn = _dsn_of(home, catalog, row, left[0], source)
        for one in left:
            confirm(
                f"Drop the slot {one.slot} at {one.source}, and its publications? The log keeps its records", yes=yes
            )
            removal = remove_slot(dsn, one, in_use=in_use)
            if home.configured(stream) is None:
                catalog.put_fact(f"capture/{row.id}", "slot_dropped", value=True)
                forget_given_up(catalog, stream, "capture")
            forget_slot(catalog, row.id, one.slot)
            note(_dropped_words(one.slot, removal.held_bytes))
            if removal.dropped:
                note(f"dropped the publications {', '.join(removal.dropped)}")
            if removal.kept:
                note(
                    "Publications that aren't Millstream's, or that other streams use, stay. To drop them, run at the source:"
                )
                _note_publications(removal.kept)


def _dsn_of(home: Home, catalog: Catalog, stream: StreamRow, left: NotedSlot, source: str | None) -> str:
    """Return a DSN that leads to the database of a left slot: the named one, or a configured stream's.

    Raises:
        UsageError: the named one leads to another database, or no stream has the database.
        SourceError: the named one can't be asked.
    """
    from millstream.capture.slot_removal import has_database
    from millstream.config.interpolation import MissingVariable, interpolate_dsn
    from millstream.errors import SourceError

    known = catalog.current_source(stream.id)
    assert known is not None, "a slot is noted after its source"
    if source is not None:
        try:
            dsn = interpolate_dsn(source, os.environ)
        except MissingVariable as error:
            raise UsageError(f"--source: {error}") from error
        if not has_database(dsn, known):
            raise UsageError(
                f"--source leads to another database than the slot {left.slot}, which lies at {left.source}",
                hint="Name the database that the stream was captured from.",
            )
        return dsn
    for dsn in {one.source.dsn: None for one in home.config.streams.values() if one.source is not None}:
        try:
            if has_database(dsn, known):
                return dsn
        except SourceError:
            continue  # perhaps another stream's source
    raise UsageError(
        f"no stream in {home.config_file} has the source {left.source} of the slot {left.slot}, or it can't be asked",
        hint=f"Name it: `millstream slot drop --stream {stream.name} --slot {left.slot} --source DSN`.",
    )


def _dropped_words(slot: str, held: int | None) -> str:
    return f"there was no slot {slot}" if held is None else f"dropped {slot}; it held {human_bytes(held)}"


def _note_publications(publications: Iterable[str]) -> None:
    for publication in publications:
        note(f"  DROP PUBLICATION IF EXISTS {quote(publication)};")
