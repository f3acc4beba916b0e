"""The catalog's pipelines and other holders of segments: how far each is, and what it still needs."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

from sqlalchemy import Row, delete, func, select, update

import millstream.catalog.sql_tables as t
from millstream.catalog.catalog_part import CatalogPart, greater, lock_stream, now_us
from millstream.catalog.row_types import PipelinePosition
from millstream.model.ids import ShardId, StreamId
from millstream.model.positions import Offset, Seq
from millstream.model.replication import ByteEnd, ReplicaPosition
from millstream.protocol.retention import CutOff, HolderKind, cut_off_error


class Holders(CatalogPart):
    """Positions of pipelines, and holders of segments."""

    def set_needed_from(
        self,
        stream: StreamId,
        pipeline: str,
        seq: Seq,
        *,
        kind: HolderKind = HolderKind.PIPELINE,
        position: ReplicaPosition | None = None,
    ) -> None:
        """Hold every segment with numbers at or above `seq` for a pipeline (or another holder). Only upward.

        Args:
            seq: the lowest number that it may still ask for. For a pipeline: the start of its last batch.
            kind: the holder's kind, if it is new.
            position: end of the bytes that the holder has of the log; replaces the earlier one. None: that stays.

        Raises:
            CursorExpired, FollowerBehindRetention: it was cut off; `release` it to begin again.
        """
        self._move_pipeline(stream, pipeline, "needed_from", seq, kind, position)

    def cut_off(self, stream: StreamId, gone: CutOff) -> bool:
        """Record that a holder was cut off: it holds nothing from now on, and gets the error when it comes again.

        Returns:
            False if it has moved on since, or is gone: then nothing was changed.
        """
        still = (t.pipelines.c.stream == str(stream)) & (t.pipelines.c.name == gone.name)
        still &= (t.pipelines.c.needed_from <= gone.needed_from) & t.pipelines.c.cut_off_at.is_(None)
        if gone.position is not None:
            still &= t.pipelines.c.position == _text_of(gone.position)
        with self._database.write() as connection:
            lock_stream(connection, stream)
            done = connection.execute(
                update(t.pipelines).where(still).values(cut_off_at=gone.first, changed_us=now_us())
            )
            return done.rowcount > 0

    def hold_all_for_followers(self, stream: StreamId) -> None:
        """Hold every segment for each follower, until it reports to a new leader how far it has the log.

        A follower that was cut off stays so.
        """
        its = (t.pipelines.c.stream == str(stream)) & (t.pipelines.c.kind == HolderKind.FOLLOWER.value)
        its &= t.pipelines.c.cut_off_at.is_(None)
        with self._database.write() as connection:
            lock_stream(connection, stream)
            connection.execute(update(t.pipelines).where(its).values(needed_from=0, position=None, changed_us=now_us()))

    def release(self, stream: StreamId, pipeline: str) -> None:
        """Forget a holder, even one that was cut off: it no longer needs anything."""
        gone = delete(t.pipelines).where(t.pipelines.c.stream == str(stream), t.pipelines.c.name == pipeline)
        with self._database.write() as connection:
            connection.execute(gone)

    def needed_from(self, stream: StreamId) -> dict[str, Seq]:
        """Return by holder the lowest number that it may still ask for, which retention has to keep."""
        return {
            p.name: p.needed_from for p in self.pipelines(stream) if p.needed_from is not None and p.cut_off_at is None
        }

    def set_landed(self, stream: StreamId, pipeline: str, seq: Seq) -> None:
        """Record that a pipeline has everything up to `seq` committed in all its tables. Only upward."""
        self._move_pipeline(stream, pipeline, "landed", seq, HolderKind.PIPELINE)

    def landed(self, stream: StreamId, pipeline: str) -> Seq:
        """Return how far a pipeline has landed; 0 if it is new."""
        return next((p.landed for p in self.pipelines(stream) if p.name == pipeline), Seq(0))

    def pipelines(self, stream: StreamId) -> list[PipelinePosition]:
        """Return every pipeline and other holder of the stream, by name."""
        query = select(t.pipelines).where(t.pipelines.c.stream == str(stream))
        with self._database.read() as connection:
            rows = sorted(connection.execute(query).all(), key=lambda row: str(row.name))
        return [pipeline_position(row) for row in rows]

    def _move_pipeline(
        self,
        stream: StreamId,
        pipeline: str,
        column: str,
        seq: Seq,
        kind: HolderKind,
        position: ReplicaPosition | None = None,
    ) -> None:
        now = now_us()
        stands = {} if position is None else {"position": _text_of(position)}
        values = {"stream": str(stream), "name": pipeline, column: seq, "changed_us": now, "kind": kind.value, **stands}
        first = self._database.insert(t.pipelines).values(values)
        upward = greater(func.coalesce(t.pipelines.c[column], 0), seq)
        change = first.on_conflict_do_update(
            index_elements=[t.pipelines.c.stream, t.pipelines.c.name],
            set_={column: upward, "changed_us": now, **stands},
        )
        with self._database.write() as connection:
            lock_stream(connection, stream)
            mine = (t.pipelines.c.stream == str(stream)) & (t.pipelines.c.name == pipeline)
            gone = connection.execute(select(t.pipelines).where(mine, t.pipelines.c.cut_off_at.is_not(None))).first()
            if gone is not None:
                raise cut_off_error(
                    CutOff(gone.name, HolderKind(gone.kind), Seq(gone.needed_from), Seq(gone.cut_off_at))
                )
            connection.execute(change)


def pipeline_position(row: Row[Any]) -> PipelinePosition:
    """Return a row of `pipelines` as a value."""
    return PipelinePosition(
        StreamId(UUID(row.stream)),
        row.name,
        None if row.needed_from is None else Seq(row.needed_from),
        Seq(row.landed),
        row.changed_us,
        HolderKind(row.kind),
        None if row.cut_off_at is None else Seq(row.cut_off_at),
        _position_of(row.position),
    )


def _text_of(position: ReplicaPosition) -> str:
    """Return a position in one canonical form, for comparison."""
    return json.dumps({str(int(shard)): [end.base_offset, end.position] for shard, end in sorted(position.items())})


def _position_of(text: str | None) -> ReplicaPosition | None:
    if text is None:
        return None
    return {ShardId(int(shard)): ByteEnd(Offset(base), place) for shard, (base, place) in json.loads(text).items()}
