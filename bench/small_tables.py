"""The number of files, and of bytes, in the lake of a few small tables while they are updated slowly and for long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from bench.figures import Figure, asked, measures, reported, say
from bench.homes import Home, make_home, wait_for
from bench.load import PacedLoad
from bench.places import folder
from bench.source import COLUMNS, DATABASE, SHAPE, VALUES, postgres

SECONDS = 600
RATE = 16
LOG_RETENTION_S = 240
"""Shorter than the default, so that ten minutes show how the log is cut."""
SIZES = (1_000, 2_000, 5_000, 10_000, 20_000, 40_000, 80_000, 160_000)
"""Rows of each table."""
LOOK_S = 5.0
BOUNDED_BYTES = 1 << 20
_ROW_BYTES = 130


@dataclass(slots=True)
class Folder:
    """One view of one table, observed from outside."""

    path: Path
    at_first: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)
    """Every file that was ever seen there."""
    factors: list[float] = field(default_factory=list)
    """Bytes on disk, including the log, over bytes of the live files, at each look."""
    live_bytes: int = 0
    oldest_s: float = 0.0
    """Greatest age of the oldest commit in the log, from the first commit of the load on."""

    def look(self, began_at: float) -> None:
        """Record the present files."""
        try:
            sizes = pa.table(DeltaTable(str(self.path)).get_add_actions(flatten=True)).column("size_bytes").to_pylist()
            found = {str(f.relative_to(self.path)): f.stat() for f in self.path.rglob("*") if f.is_file()}
        except (DeltaError, OSError):
            return  # A file was deleted between two steps.
        names = set(found) - {"_delta_log/_last_checkpoint"}
        self.at_first = self.at_first or names
        self.seen |= names
        self.live_bytes = sum(sizes)
        self.factors.append(sum(facts.st_size for facts in found.values()) / max(1, self.live_bytes))
        commits = [s.st_mtime for n, s in found.items() if n.startswith("_delta_log/") and n.endswith(".json")]
        self.oldest_s = max(self.oldest_s, time.time() - max(began_at, min(commits)))

    @property
    def written(self) -> int:
        """Return the files that came since the first look."""
        return len(self.seen - self.at_first)


@measures("lake_files_small_tables", "lake_files_small_tables_log_age_s", "lake_files_small_tables_disk_factor")
def lake_files_small_tables() -> Iterator[Figure]:
    """Measure uniform updates of eight tables."""
    seconds = asked.seconds or SECONDS
    rows = sum(SIZES)
    say(f"lake_files_small_tables: {len(SIZES)} tables of {rows:,} rows, {RATE} transactions a second for {seconds} s")
    names = [f"t{number}" for number in range(len(SIZES))]
    with postgres(load_unsynced=False) as server, folder("small-tables") as path:
        with server.connect(DATABASE) as connection:
            for name, size in zip(names, SIZES, strict=True):
                connection.execute(f"CREATE TABLE {name} ({COLUMNS}, client int, n bigint)")
                connection.execute(f"INSERT INTO {name} SELECT {VALUES}, -1, 0 FROM generate_series(1, {size}) AS n")
        lake = f'log_retention = "{LOG_RETENTION_S}s"'
        home = make_home(server, path / "home", [f"public.{name}" for name in names], lake=lake)
        home.run("run", "--until-caught-up")
        (path / "load").mkdir()
        each = [
            f"\\set id{number} random(1, {size})\n"
            f"UPDATE {name} SET total = total + 1, client = :client_id, n = :n WHERE id = :id{number}"
            for number, (name, size) in enumerate(zip(names, SIZES, strict=True))
        ]
        with home.running("run") as run:
            wait_for("the log's mark", lambda: _runs(home), process=run)
            load = PacedLoad(server, path / "load", ";\n".join(each), rate=RATE // len(SIZES), seconds=seconds)
            folders = _watched(home, names, seconds)
            load.wait()
    history, current = folders["history"], folders["current"]
    minutes = seconds / 60
    bounded = [f for f in current if f.live_bytes > BOUNDED_BYTES]
    said = (
        f"{len(SIZES)} tables of {SIZES[0]:,} to {SIZES[-1]:,} rows, {SHAPE} and two more integers; {RATE // len(SIZES) * len(SIZES)} updates a second, each a transaction"
        f" of its own and each table in turn, for {seconds} s; `log_retention` {LOG_RETENTION_S} s; looked at from outside every {LOOK_S:.0f} s"
    )
    size_bytes = rows * _ROW_BYTES
    yield reported(
        "lake_files_small_tables",
        [max(f.written for f in current) / minutes],
        unit="files/min",
        goal="< 15",
        rows=rows,
        size_bytes=size_bytes,
        note="files of any kind (data, commits, checkpoints) that came into the folder of `current` a minute, of the table with the most;"
        f" into that of history {max(f.written for f in history) / minutes:.0f}; {said}",
    )
    yield reported(
        "lake_files_small_tables_log_age_s",
        [max(f.oldest_s for f in (*history, *current))],
        unit="s",
        goal=f"< {LOG_RETENTION_S + 300}",
        rows=rows,
        size_bytes=size_bytes,
        note=f"age of the oldest commit in any `_delta_log` of `current` and history, by the file's time, at most; {said}",
    )
    late = [f.factors[len(f.factors) // 2 :] for f in bounded]
    yield reported(
        "lake_files_small_tables_disk_factor",
        [max(max(factors) for factors in late)],
        unit="x",
        goal="<= 5",
        rows=rows,
        size_bytes=max(f.live_bytes for f in bounded),
        note=f"bytes in the folder of `current`, its log's too, over its live files' bytes, the most in the second half, of {len(bounded)} tables over 1 MiB; {said}",
    )


def _runs(home: Home) -> bool:
    """Return whether the pipeline has logged that it runs."""
    return "pipeline" in (home.path.parent / "run.log").read_text()


def _watched(home: Home, names: list[str], seconds: int) -> dict[str, list[Folder]]:
    """Look at the folders of all tables for as long as the load runs."""
    root = home.path / "lake" / "bench"
    folders = {v: [Folder(root / v / f"public.{name}") for name in names] for v in ("history", "current")}
    began_at = time.time()
    while time.time() < began_at + seconds:
        for some in folders.values():
            for one in some:
                one.look(began_at)
        time.sleep(LOOK_S)
    return folders
