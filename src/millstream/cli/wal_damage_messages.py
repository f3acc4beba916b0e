"""The messages of `wal …` about damage, and the tables concerned."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from millstream.cli.context import note

if TYPE_CHECKING:
    from collections.abc import Iterable

    from millstream.model.ids import TableId
    from millstream.wal.mending.inspect import Loss


class TableWords:
    """A log's tables as people know them: `public.orders (3)`; only the number if no schema can be read."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    @cached_property
    def _names(self) -> dict[TableId, str]:
        from millstream.wal.files import RealFiles
        from millstream.wal.salvage import KnownSchemas

        return KnownSchemas(RealFiles(), self._folder).names()

    def __call__(self, table: TableId) -> str:
        """Return one."""
        name = self._names.get(table)
        return str(table) if name is None else f"{name} ({table})"

    def of(self, tables: Iterable[TableId] | None) -> str:
        """Return ` of table …`, for several or all."""
        return "" if tables is None else f" of table {', '.join(self(table) for table in tables)}"


def say_loss(loss: Loss, tables: TableWords, *, accepted: bool = False) -> None:
    """Print one, on stderr."""
    lost = ""
    if loss.offset_from is not None and loss.offset_from != loss.offset_to:
        upto = "?" if loss.offset_to is None else loss.offset_to
        lost = f"; records{tables.of(loss.tables)} at offsets [{loss.offset_from}, {upto}) can't be read"
        if loss.first_seq and loss.last_seq:
            lost += f", numbers {loss.first_seq}-{loss.last_seq}"
    note(f"{'lost, and accepted' if accepted else 'damaged'}: {loss.file}@{loss.byte}: {loss.why}{lost}")
