"""Spark's own notes of a pipeline (`data/spark/<pipeline>/`), checked against the lake before a query starts on them.

The lake's last cut is authoritative. Spark's notes only make a restart replay exactly the batch
that was in flight. A pipeline without notes, or with older ones, is still correct, since each table
drops what it has. Notes *ahead* of the lake are different: the lake was moved away or restored from
a copy, and starting from them would leave a gap.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

from millstream.model.ids import StreamId
from millstream.model.positions import Seq
from millstream.spark.source import position_of

_VERSION_LINE: Final = "v1"


def prepare_checkpoint(folder: Path, stream: StreamId, cut: Seq | None, log_first: Seq = Seq(1)) -> bool:
    """Ensure that a query may start on `folder`: drop notes that are ahead of `cut`, the lake's last.

    Notes that continue from a position that the log no longer has are dropped too. Either the lake
    has what they lack, or `cut` itself has expired.

    Args:
        folder: the notes' folder.
        stream: the stream that they must belong to.
        cut: the lake's last cut.
        log_first: the lowest number that the log still has.

    Returns:
        Whether notes were dropped.

    Raises:
        EngineError (`checkpoint_foreign`): the notes are another stream's; nothing was dropped.
    """
    planned = _offsets(folder)
    for offset in planned.values():
        position_of(offset, stream)  # any offset of another stream, even an old one, makes the folder foreign
    done = [number for number in _numbers(folder / "commits") if number in planned]
    # A batch is noted as done only after its cut is in the lake. A batch that is only planned is
    # replayed, whatever the lake has.
    begun = [number for number in planned if not done or number > max(done)]
    ahead = bool(done) and position_of(planned[max(done)], stream) > (cut or Seq(0))
    # Without a batch that is done, the query would continue from the first planned batch's start,
    # which only the lake has.
    unfounded = bool(begun) and not done and min(planned) > 0
    expired = bool(done) and position_of(planned[max(done)], stream) < log_first - 1
    if ahead or unfounded or expired or _is_torn(folder):
        shutil.rmtree(folder)
        return True
    return False


def goes_on_from(folder: Path, stream: StreamId) -> Seq | None:
    """Return the number behind which a query that starts on these notes reads the log: the end of the last done batch.

    The lake may be a batch ahead of it, if the process was killed between its own commit and
    Spark's. None: there are no notes, and the query begins at its configured start.
    """
    planned = _offsets(folder)
    done = [number for number in _numbers(folder / "commits") if number in planned]
    if done:
        return position_of(planned[max(done)], stream)
    return Seq(0) if planned else None


def _offsets(folder: Path) -> dict[int, dict[str, Any]]:
    """Return each batch's end offset."""
    found = {}
    for number in _numbers(folder / "offsets"):
        lines = (folder / "offsets" / str(number)).read_text().splitlines()
        if len(lines) >= 3 and lines[0] == _VERSION_LINE:
            found[number] = json.loads(lines[2])
    return found


def _numbers(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal())


def _is_torn(folder: Path) -> bool:
    """Whether a power loss left an empty file, on which Spark refuses to start (it doesn't sync its notes)."""
    names = [folder / "metadata", *(folder / "offsets").glob("[0-9]*"), *(folder / "commits").glob("[0-9]*")]
    return any(name.is_file() and name.stat().st_size == 0 for name in names)
