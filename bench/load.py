"""A paced load of small transactions, by pgbench, with the commit time of each as its client saw it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from bench.source import DATABASE
from millstream.testing.postgres import EmbeddedPostgres

CLIENTS = 4
Ints = npt.NDArray[np.int64]
Protocol = Literal["prepared", "simple"]


@dataclass(frozen=True, slots=True)
class Load:
    """The transactions of a run. A transaction writes its client and its number, from 1, into a row."""

    client: Ints
    number: Ints
    committed_ns: Ints
    """Wall-clock times when the client had its commit's answer."""

    def __len__(self) -> int:
        return len(self.client)


class PacedLoad:
    """Run pgbench with a rate, in the background.

    Args:
        server: the target.
        folder: an empty one for its script and logs.
        statement: SQL of one row that uses `:client_id` and `:n`.
        rate: transactions a second over all clients.
        seconds: duration.
        protocol: `simple` also replaces variables within names.
    """

    def __init__(
        self,
        server: EmbeddedPostgres,
        folder: Path,
        statement: str,
        *,
        rate: int,
        seconds: int,
        protocol: Protocol = "prepared",
    ) -> None:
        self._folder = folder
        script = folder / "script.sql"
        script.write_text(f"\\set n :n + 1\n{statement};\n")
        command = [str(server.program("pgbench")), "--no-vacuum", "--file", str(script), "--define", "n=0"]
        command += ["--client", str(CLIENTS), "--jobs", "1", "--rate", str(rate), "--time", str(seconds)]
        command += ["--protocol", protocol, "--log", "--log-prefix", str(folder / "log"), server.dsn(DATABASE)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def wait(self) -> Load:
        """Return the transactions of the run, once it has ended."""
        _, messages = self._process.communicate()
        if self._process.returncode:
            raise RuntimeError(f"pgbench ended with {self._process.returncode}: {messages[-2000:]}")
        lines = [line.split() for path in sorted(self._folder.glob("log.*")) for line in path.read_text().splitlines()]
        columns = np.array([[int(line[0]), int(line[1]), int(line[4]), int(line[5])] for line in lines], dtype=np.int64)
        client, count, seconds, micros = columns.T
        # pgbench counts a client's transactions from 0 or 1, by its version; `:n` counts from 1.
        first = int(count.min())
        return Load(client, count - first + 1, (seconds * 1_000_000 + micros) * 1000)

    def stop(self) -> None:
        """End it early; do nothing if it has ended."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def percentiles_of_windows(
    load: Load, latency_ms: npt.NDArray[np.float64], windows: int
) -> tuple[list[float], list[float]]:
    """Return the 50th and the 99th percentile of each of the windows of equal length that has transactions."""
    begin, end = load.committed_ns.min(), load.committed_ns.max() + 1
    window = (load.committed_ns - begin) * windows // (end - begin)
    found = [np.percentile(latency_ms[window == number], (50, 99)) for number in np.unique(window)]
    return [float(p50) for p50, _ in found], [float(p99) for _, p99 in found]
