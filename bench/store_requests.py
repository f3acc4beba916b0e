"""Requests that a batch sends to an object store, counted by a proxy in front of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from uuid import uuid4

from bench.figures import Figure, asked, measures, reported, say
from bench.lakes import ACCOUNTS, ACCOUNTS_SHAPE, records, uniform
from bench.places import folder
from millstream.lake.commit_cuts import commit_cut
from millstream.lake.history import commit_records, write_records
from millstream.lake.layout import LakeLayout
from millstream.lake.table_renames import places_of
from millstream.model.ids import StreamId
from millstream.model.positions import Seq
from millstream.testing.s3 import EmbeddedS3
from millstream.testing.store_proxy import StoreProxy, StoreRequest

BATCHES = 20
_ROWS = 100
_TABLES = 2
"""Tables of a batch that get a commit: the history, and `_commits`."""


@measures("lake_requests_per_batch")
def lake_requests_per_batch() -> Iterator[Figure]:
    """Count the requests of steady batches, by the functions that a task and the driver call for one table."""
    batches = asked.runs or BATCHES
    say(f"lake_requests_per_batch: {batches} batches of one table")
    with (
        folder("requests") as path,
        EmbeddedS3(path / "s3") as store,
        StoreProxy(path / "proxy", store.endpoint) as proxy,
    ):
        options = store.lake_options | {"AWS_ENDPOINT_URL": proxy.url}
        layout = LakeLayout(f"{store.url}/lake", "bench", StreamId(uuid4()), storage_options=options)
        counts: list[float] = []
        kinds: Counter[str] = Counter()
        n, cut = Seq(0), None
        for batch in range(batches + 1):
            began = len(proxy.requests())
            found = records("c", uniform(1_000_000, _ROWS, seed=batch), after=int(n))
            n = Seq(n + _ROWS)
            places = places_of(cut)
            written = write_records(layout, ACCOUNTS, [found], n, places=places)
            commit = commit_records(layout, [written], n, places=places)
            cut = commit_cut(layout, n, [commit], committed_at=datetime.now(UTC))
            sent = proxy.requests()[began:]
            if batch:  # the first one makes the tables
                counts.append(len(sent) / _TABLES)
                kinds.update(map(_kind, sent))
        told = ", ".join(f"{kind} {count / batches / _TABLES:.1f}" for kind, count in kinds.most_common())
        yield reported(
            "lake_requests_per_batch",
            counts,
            unit="requests per touched table",
            goal="<= 6",
            rows=_ROWS,
            size_bytes=_ROWS * 100,
            note=f"{batches} batches of {_ROWS} rows in one table, {ACCOUNTS_SHAPE}; all requests of task and driver between two rows of `_commits`,"
            f" over the history with a commit and `_commits`; a proxy in front of moto counts. Means: {told}",
        )


def _kind(request: StoreRequest) -> str:
    path, _, query = request.path.partition("?")
    if "list-type" in query:
        return "list"
    if "uploads" in query or "uploadId" in query:
        return "multipart"
    where = "log" if "/_delta_log/" in path else "data"
    return f"{request.method} {where}"
