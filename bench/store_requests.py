"""Requests that a batch sends to an object store, counted by a proxy in front of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context
from typing import Literal
from uuid import uuid4

from tests.servers.store_proxy import StoreProxy, StoreRequest

from bench.figures import Figure, asked, measures, reported, say
from bench.made_lakes import ACCOUNTS, ACCOUNTS_SHAPE, records, uniform
from bench.places import folder
from millstream.lake.commit_cuts import commit_cut
from millstream.lake.history import commit_records, write_records
from millstream.lake.layout import LakeLayout
from millstream.lake.table_renames import places_of
from millstream.model.ids import StreamId
from millstream.model.positions import Seq
from millstream.testing.s3 import EmbeddedS3

BATCHES = 20
_ROWS = 100
_TABLES = 2
"""Tables of a batch that get a commit: the history, and `_commits`."""
_EARLIER = 2
"""Batches before those that count: the first makes the tables, the second is the first that a process sees of them."""


@measures("lake_requests_per_batch", "lake_requests_per_batch_iceberg")
def lake_requests_per_batch() -> Iterator[Figure]:
    """Count the requests of steady batches, by the functions that a task and the driver call for one table."""
    yield _counted("lake_requests_per_batch", "delta", "<= 6")
    yield _counted("lake_requests_per_batch_iceberg", "iceberg", "<= 12")


def _counted(name: str, kind: Literal["delta", "iceberg"], goal: str) -> Figure:
    batches = asked.runs or BATCHES
    say(f"{name}: {batches} batches of one table")
    with (
        folder("requests") as path,
        EmbeddedS3(path / "s3") as store,
        StoreProxy(path / "proxy", store.endpoint) as proxy,
        # A task's process knows less of the tables than the driver's does.
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as worker,
    ):
        options = store.lake_options | {"AWS_ENDPOINT_URL": proxy.url}
        catalog = {"type": "sql", "uri": f"sqlite:///{path}/iceberg.db"} if kind == "iceberg" else {}
        place = f"{store.url}/lake"
        layout = LakeLayout(place, "bench", StreamId(uuid4()), storage_options=options, format=kind, catalog=catalog)
        counts: list[float] = []
        kinds: Counter[str] = Counter()
        n, cut = Seq(0), None
        for batch in range(_EARLIER + batches):
            began = len(proxy.requests())
            found = records("c", uniform(1_000_000, _ROWS, seed=batch), after=int(n))
            n = Seq(n + _ROWS)
            places = places_of(cut)
            written = worker.submit(write_records, layout, ACCOUNTS, [found], n, places=places).result()
            commit = commit_records(layout, [written], n, places=places)
            cut = commit_cut(layout, n, [commit], committed_at=datetime.now(UTC))
            sent = proxy.requests()[began:]
            if batch >= _EARLIER:
                counts.append(len(sent) / _TABLES)
                kinds.update(map(_kind, sent))
        told = ", ".join(f"{kind} {count / batches / _TABLES:.1f}" for kind, count in kinds.most_common())
        return reported(
            name,
            counts,
            unit="requests per touched table",
            goal=goal,
            rows=_ROWS,
            size_bytes=_ROWS * 100,
            note=f"{batches} batches of {_ROWS} rows in one table, {ACCOUNTS_SHAPE}; all requests of a task in a process of its own and of"
            f" the driver between two rows of `_commits`, over the history with a commit and `_commits`; a proxy in front of moto"
            f" counts. Means: {told}",
        )


def _kind(request: StoreRequest) -> str:
    path, _, query = request.path.partition("?")
    if "list-type" in query:
        return "list"
    if "uploads" in query or "uploadId" in query:
        return "multipart"
    where = "log" if "/_delta_log/" in path else "data"
    return f"{request.method} {where}"
