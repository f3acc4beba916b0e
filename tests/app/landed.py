"""A home whose real capture runs in the test's process, and whose log the lake's own functions land, without Spark."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.app.homes import wait_for
from tests.lake.landing import append_history

from millstream.administration.initialize import make_home
from millstream.app.open_home import open_other
from millstream.home.config_mapping import lake_layout
from millstream.home.home import Home
from millstream.lake.commit_cuts import commit_cut, last_cut
from millstream.lake.folded.current_table import fold_table
from millstream.lake.layout import has_current
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableKind, TableSchema
from millstream.processes.child_process import Lifeline
from millstream.processes.role_locks import Role, RoleLock, holder
from millstream.wal.reader import StreamReader
from millstream.writers.owner import run_owner


class LandedHome:
    """A home with one stream, `shop`."""

    def __init__(self, path: Path, dsn: str | None, *, tables: tuple[str, ...] = ("public.*",)) -> None:
        """Make the home. Without a source, the home must exist; its stream takes appends."""
        if dsn is not None:
            made = make_home(path, stream="shop", source=dsn, tables=tables)
            assert made.file.exists()
        self.home = Home(path)
        self.schemas: dict[TableId, TableSchema] = {}
        self._reader: StreamReader | None = None

    def catch_up(self) -> None:
        """Capture everything that the source has, then land it."""
        self.capture()
        self.land()

    def capture(self) -> None:
        """Run capture like `capture run --until-caught-up`."""
        run_owner(self.home, Lifeline(), open_other=open_other, until_caught_up=True, on_progress=_ignore)

    def land(self, *, fold: bool = True) -> Seq:
        """Land everything that the log has now, as one batch."""
        config = self.home.config.streams["shop"]
        # Keep this reader: a new one would read the log's open segment from its beginning, each time.
        reader = self._reader = self._reader or StreamReader(str(self.home.wal_folder("shop")), definitions=True)
        layout = lake_layout(self.home, "shop", config, reader.stream_id)
        cut = last_cut(layout)
        after, upto = Seq(0) if cut is None else cut.n, reader.persisted_upto()
        batches: dict[TableId, list[pa.RecordBatch]] = defaultdict(list)
        for found in reader.read_between(after, upto):
            if found.schema.kind is not TableKind.RAW:
                batches[found.schema.table_id].append(found.batch)
                self.schemas[found.schema.table_id] = found.schema.defined()
        commits = [append_history(layout, self.schemas[table], some, upto) for table, some in batches.items()]
        if fold:  # also what an earlier batch left unfolded
            commits += [fold_table(layout, schema, upto) for schema in self.schemas.values() if has_current(schema)]
        if upto > after:
            commit_cut(layout, upto, commits, committed_at=datetime.now(UTC))
        return upto

    @contextmanager
    def running(self, *, lands: bool = True) -> Iterator[None]:
        """Run capture and landing in threads of their own until the block ends."""
        lifeline = Lifeline()
        errors: list[BaseException] = []

        def guarded(work: Any) -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - handed to the test's thread
                errors.append(error)
                lifeline.stop.set()

        def land() -> None:
            with RoleLock.take(self.home.run_folder, "pipeline"):
                reader = StreamReader(str(self.home.wal_folder("shop")))
                n = Seq(0)
                rounds = 0
                while not lifeline.stop.is_set():
                    if reader.wait_beyond(n, 0.2):
                        rounds += 1
                        n = self.land(fold=rounds % 3 == 0)

        work = [lambda: run_owner(self.home, lifeline, open_other=open_other, on_progress=_ignore)] + [land] * lands
        threads = [threading.Thread(target=guarded, args=(one,)) for one in work]
        for thread in threads:
            thread.start()
        try:
            # Yield only once both parts hold their locks, so that a check for running parts finds them.
            roles: tuple[Role, ...] = ("owner", "pipeline") if lands else ("owner",)
            wait_for(lambda: errors or all(holder(self.home.run_folder, role) for role in roles))
            yield
        finally:
            lifeline.stop.set()
            for thread in threads:
                thread.join(300)
        if errors:
            raise errors[0]


def _ignore(_facts: dict[str, Any]) -> None:
    """Ignore progress."""
