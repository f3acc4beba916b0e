"""The catalog's table copies: chunks from which an interrupted copy goes on, and copies that are paused."""

from __future__ import annotations

import json
from collections.abc import Iterable

from sqlalchemy import delete, select

import millstream.catalog.sql_tables as t
from millstream.catalog.catalog_part import CatalogPart
from millstream.catalog.facts import delete_fact, write_fact
from millstream.catalog.row_types import ChunkState, CopyChunk, TableState
from millstream.model.ids import StreamId, TableId
from millstream.model.positions import Lsn

_UNFINISHED = (TableState.COPY_REQUESTED.value, TableState.COPYING.value)


class Copies(CatalogPart):
    """Chunks of table copies, and pauses."""

    def pause_copy(self, stream: StreamId, table: TableId) -> bool:
        """Pause a table's copy until `resume_copy`; return whether there is one. The table's state doesn't change."""
        with self._database.write() as connection:
            # Locked: either a copy that ends at this moment is seen as ended, or it removes the pause.
            row = select(t.tables.c.state).where(t.tables.c.id == table).with_for_update()
            if connection.execute(row).scalar() not in _UNFINISHED:
                return False
            write_fact(self._database, connection, pauses_scope(stream), str(int(table)), value=True)
        return True

    def resume_copy(self, stream: StreamId, table: TableId) -> bool:
        """Let a table's copy go on; return whether it was paused."""
        with self._database.write() as connection:
            return delete_fact(connection, pauses_scope(stream), str(int(table)))

    def paused_copies(self, stream: StreamId) -> frozenset[TableId]:
        """Return the tables whose copies are paused."""
        query = select(t.facts.c.name).where(t.facts.c.scope == pauses_scope(stream))
        with self._database.read() as connection:
            return frozenset(TableId(int(name)) for name in connection.execute(query).scalars())

    def put_chunks(self, chunks: Iterable[CopyChunk]) -> None:
        """Write chunks in their present state, new and existing ones, all or none."""
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
        # In one order, so that two processes don't deadlock.
        rows.sort(key=lambda row: (row["table_id"], row["copy_id"], row["number"]))
        change = self._database.insert(t.copy_chunks)
        changed = {name: change.excluded[name] for name in rows[0] if name not in {"table_id", "copy_id", "number"}}
        keys = [t.copy_chunks.c.table_id, t.copy_chunks.c.copy_id, t.copy_chunks.c.number]
        with self._database.write() as connection:
            connection.execute(change.on_conflict_do_update(index_elements=keys, set_=changed), rows)

    def chunks(self, table: TableId, copy_id: str) -> list[CopyChunk]:
        """Return the chunks of one copy, by number."""
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

    def drop_chunks(self, table: TableId) -> None:
        """Delete the chunks of a table's copies."""
        with self._database.write() as connection:
            connection.execute(delete(t.copy_chunks).where(t.copy_chunks.c.table_id == table))


def pauses_scope(stream: StreamId) -> str:
    """Return the scope of the facts that name the tables whose copies are paused."""
    return f"copy pauses/{stream}"
