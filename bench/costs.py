"""The cost of a running command with all its processes: CPU time, memory, and bytes written to disk."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

from bench.figures import Figure, reported
from bench.places import as_installed

_LOOK_S = 0.2
_MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of some rows."""

    rows: int
    cpu_s: float
    """User and system time."""
    peak_bytes: int
    """The most memory at once: proportional set sizes (PSS), so that a shared page counts once."""
    written_bytes: int
    """Bytes that went to the disk, as the kernel counts them (`write_bytes`)."""


class CostWatch:
    """Watches a process and its descendants, from the watch's creation until `stop`.

    Looks five times a second. A process that ends is missing at most what it used since the last look.
    """

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._cpu_s: dict[psutil.Process, float] = {}
        self._written_bytes = 0
        self._peak_bytes = 0
        self._stop = threading.Event()
        self._look()
        self._before = self._used()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self, rows: int) -> Cost:
        """Return what was used since the watch began."""
        self._stop.set()
        self._thread.join()
        self._look()
        cpu_s, written_bytes = self._used()
        return Cost(rows, cpu_s - self._before[0], self._peak_bytes, written_bytes - self._before[1])

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        processes = [self._root]
        with contextlib.suppress(psutil.Error):
            processes += self._root.children(recursive=True)
        memory_bytes = written_bytes = 0
        for process in processes:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                self._cpu_s[process] = times.user + times.system
                written_bytes += process.io_counters().write_bytes
                memory_bytes += process.memory_full_info().pss
        self._peak_bytes = max(self._peak_bytes, memory_bytes)
        # Linux adds what a child has written to its parent once the parent has waited for it, so that the sum over the
        # living processes keeps what the ended ones wrote.
        self._written_bytes = max(self._written_bytes, written_bytes)

    def _used(self) -> tuple[float, int]:
        return sum(self._cpu_s.values()), self._written_bytes


def run_watched(command: Sequence[str], rows: int) -> tuple[float, Cost]:
    """Run a command to its end; return the seconds that it took, and its cost. Show its messages if it fails."""
    with tempfile.TemporaryFile("w+") as messages:
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=messages, stderr=messages, env=as_installed()) as process:
            watch = CostWatch(process.pid)
            process.wait()
            took_s = time.perf_counter() - began
            cost = watch.stop(rows)
        if process.returncode:
            messages.seek(0)
            raise RuntimeError(f"{command} ended with {process.returncode}:\n{messages.read()[-4000:]}")
    return took_s, cost


def cost_names(name: str) -> tuple[str, str, str]:
    """Return the names of the figures that `cost_figures` yields."""
    return f"{name}_cpu_s_per_million", f"{name}_memory_mib", f"{name}_written_mib_per_million"


def cost_figures(name: str, costs: Sequence[Cost], *, row_bytes: int, note: str) -> Iterator[Figure]:
    """Yield CPU seconds and MiB written per million rows, and the peak of memory."""
    rows = costs[0].rows
    values = (
        ([cost.cpu_s / cost.rows * _MILLION for cost in costs], "s", "user and system time per million rows"),
        ([cost.peak_bytes / 2**20 for cost in costs], "MiB", "the most memory at once (PSS)"),
        (
            [cost.written_bytes / cost.rows * _MILLION / 2**20 for cost in costs],
            "MiB",
            "bytes written to the disk per million rows",
        ),
    )
    for figure, (runs, unit, what) in zip(cost_names(name), values, strict=True):
        yield reported(
            figure,
            runs,
            unit=unit,
            goal="reported",
            rows=rows,
            size_bytes=rows * row_bytes,
            note=f"{what}, of all processes of the command together; {note}",
        )
