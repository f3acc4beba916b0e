"""Distribute tests among processes, so that each costly start is made once.

In the quick tier one large server serves all tests that use it. Machine code is compiled by one process.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

from xdist.scheduler import LoadFileScheduling

TOGETHER: Final = {
    "tests/bench/test_small.py": "spark",
    "tests/spark/test_left_partitions.py": "spark",
    "tests/spark/test_pipeline.py": "spark",
    "tests/spark/test_sink.py": "spark",
    "tests/spark/test_source.py": "spark",
    "tests/buffers/test_kafka.py": "kafka",
    "tests/delivery/test_kafka_fatal_errors.py": "kafka",
    "tests/delivery/test_kafka_sink.py": "kafka",
}
"""Fixture by file. A process starts a server for itself: Spark takes 15 s of a core, Kafka 6, before the first test runs."""
_COMPILE: Final = """
from millstream.codec import pgoutput
from millstream.ingest import line_protocol

pgoutput.warm()
line_protocol.warm()
"""


class ByServer(LoadFileScheduling):
    """Gives each file to one process, and all files of one large server to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return TOGETHER.get(file, file)


def compile_ahead() -> Callable[[], None]:
    """Compile the decoders in a process of its own, while the tests' processes collect; return what waits for its end.

    Without kept machine code each of them would compile: half a minute of a core.
    """
    with _lock() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of the open file: it lasts until the process ends
        process = subprocess.Popen([sys.executable, "-c", _COMPILE], pass_fds=[lock.fileno()])

    def end() -> None:
        process.wait()

    return end


def wait_for_machine_code() -> None:
    """Return once no other process compiles ahead."""
    with _lock() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)


def _lock() -> IO[bytes]:
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / "compiling").open("ab")
