"""A capture in its own process, until it has caught up.

    python -m tests.capture.catching_up_process FOLDER FACTS

It captures into a log on disk, so that it can be killed. FACTS are those of `CaptureConfig`, as JSON.
It prints its largest resident memory, in KiB.
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import closing
from pathlib import Path

from millstream.capture.config import CaptureConfig
from millstream.capture.run import run_capture
from millstream.catalog import Catalog
from millstream.model.operations import FIRST_SHARD
from millstream.protocol.catch_up_mode import CatchUpMode
from millstream.wal.writing.writer import LogWriter


def main(folder: Path, facts: dict[str, object]) -> None:
    with closing(Catalog(folder / "catalog.db")) as catalog:
        stream = catalog.resolve_stream("shop")
        writer_id, epoch = catalog.register_writer(stream)
        writer = LogWriter.open(
            str(folder / "wal"),
            stream=stream,
            shards=[FIRST_SHARD],
            epoch=epoch,
            reservations=catalog.reservations(stream),
            writer=writer_id,
        )
        config = CaptureConfig(**facts | {"catch_up": CatchUpMode(str(facts["catch_up"]))})  # type: ignore[arg-type]
        with closing(writer):
            outcome = run_capture(config, catalog, writer, stop=threading.Event(), until_caught_up=True)
        assert outcome.caught_up
    status = Path("/proc/self/status").read_text().splitlines()
    sys.stdout.write(next(line.split()[1] for line in status if line.startswith("VmHWM")))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
