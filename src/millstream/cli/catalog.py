"""`catalog move`: moves the embedded catalog into PostgreSQL."""

from __future__ import annotations

import click

from millstream.cli.context import (
    Invocation,
    SuggestingGroup,
    note,
    pass_invocation,
)


@click.group(cls=SuggestingGroup)
def catalog() -> None:
    """Manage the catalog, which the home's processes share: streams, positions, tables."""


@catalog.command("move")
@pass_invocation
def catalog_move(invocation: Invocation) -> None:
    """Move the embedded catalog into the PostgreSQL database in [catalog] url.

    Stop all processes of the home first.
    """
    from millstream.administration.catalog_move import move_catalog

    home = invocation.home(needs_source=False)
    moved = move_catalog(home)
    note(f"{', '.join(moved.streams) or 'no stream'}: moved to the {moved.place}; the old file is now {moved.kept}")
