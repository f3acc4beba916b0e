"""The catalog's chunks of table copies: what a copy that was cut short goes on from."""

from __future__ import annotations

import json
from collections.abc import Iterable

from sqlalchemy import delete, select

from millstream.catalog import tables as t
from millstream.catalog.part import CatalogPart
from millstream.catalog.values import ChunkState, CopyChunk
from millstream.model.ids import TableId
from millstream.model.positions import Lsn


class Copies(CatalogPart):
    """Chunks of table copies."""

    def put_chunks(self, chunks: Iterable[CopyChunk]) -> None:
        """Write chunks as they are now, new ones and those there were, all or none."""
        rows = [
            {
                "table_id": c.table,
                "copy_id": c.copy_id,
                "number": c.number,
                "lower": c.lower,
                "upper": c.upper,
                "state": c.state.value,
                "snapshot": c.snapshot,
                "lsn": c.lsn,
                "row_count": c.row_count,
                "size_bytes": c.size_bytes,
                "facts": json.dumps(c.facts),
            }
            for c in chunks
        ]
        if not rows:
            return
        # In one order, so that of two processes one waits for the other and neither for both.
        rows.sort(key=lambda row: (row["table_id"], row["copy_id"], row["number"]))
        change = self._database.insert(t.copy_chunks)
        changed = {name: change.excluded[name] for name in rows[0] if name not in {"table_id", "copy_id", "number"}}
        keys = [t.copy_chunks.c.table_id, t.copy_chunks.c.copy_id, t.copy_chunks.c.number]
        with self._database.write() as connection:
            connection.execute(change.on_conflict_do_update(index_elements=keys, set_=changed), rows)

    def chunks(self, table: TableId, copy_id: str) -> list[CopyChunk]:
        """The chunks of one copy, by number."""
        query = select(t.copy_chunks).where(t.copy_chunks.c.table_id == table, t.copy_chunks.c.copy_id == copy_id)
        with self._database.read() as connection:
            rows = connection.execute(query.order_by(t.copy_chunks.c.number)).all()
        return [
            CopyChunk(
                table=TableId(r.table_id),
                copy_id=r.copy_id,
                number=r.number,
                lower=r.lower,
                upper=r.upper,
                state=ChunkState(r.state),
                snapshot=r.snapshot,
                lsn=None if r.lsn is None else Lsn(r.lsn),
                row_count=r.row_count,
                size_bytes=r.size_bytes,
                facts=json.loads(r.facts),
            )
            for r in rows
        ]

    def drop_chunks(self, table: TableId, *, but: str = "") -> None:
        """Forget the chunks of a table's copies, those of copy `but` excepted."""
        old = delete(t.copy_chunks).where(t.copy_chunks.c.table_id == table, t.copy_chunks.c.copy_id != but)
        with self._database.write() as connection:
            connection.execute(old)
