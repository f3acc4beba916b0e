"""`slot drop`: drops a stream's replication slot at the source."""

from __future__ import annotations

import click

from millstream.cli.context import (
    Invocation,
    SuggestingGroup,
    confirm,
    note,
    pass_invocation,
    stream_option,
)
from millstream.model.names import quote


@click.group(cls=SuggestingGroup)
def slot() -> None:
    """Manage the replication slot at the source."""


@slot.command("drop")
@stream_option
@click.option("--yes", is_flag=True, help="Don't ask for confirmation.")
@pass_invocation
def slot_drop(invocation: Invocation, stream: str | None, yes: bool) -> None:
    """Drop a stream's slot, to free the source's disk.

    Later changes are not captured; the next run copies every table again.
    """
    from millstream.capture.source_checks import drop_slot
    from millstream.home.config_mapping import capture_config
    from millstream.model.human_text import human_bytes
    from millstream.writers.stall_reasons import forget_given_up

    home = invocation.home()
    name, stream_config = home.stream_config(stream)
    capture = capture_config(home, name, stream_config)
    confirm(f"Drop the slot {capture.slot}? The next run will copy every table of {name} again", yes=yes)
    home.prepare()
    with home.open_catalog() as catalog:
        catalog.resolve_stream(name)
        held = drop_slot(capture, catalog)
        forget_given_up(catalog, name, "capture")
    note(
        f"there was no slot {capture.slot}" if held is None else f"dropped {capture.slot}; it held {human_bytes(held)}"
    )
    note("Its publications stay for the next run. If there will be none, run at the source:")
    for publication in (capture.publication, f"{capture.publication}_inserts"):
        note(f"  DROP PUBLICATION IF EXISTS {quote(publication)};")
