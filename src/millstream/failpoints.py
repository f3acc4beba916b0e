"""Points in the code at which a test may kill or halt the process, as an environment variable asks.

With `MILLSTREAM_FAILPOINTS="capture.before_confirm:2,wal.before_fsync"`, SIGKILL kills the process
at its second hit of the first point, or its first hit of the second point. `wal.after_fsync:3:stop`
halts it at the third hit, by SIGSTOP, until SIGCONT. If the variable is unset, a point costs next
to nothing. Child processes inherit the variable, each with its own counts.

If `MILLSTREAM_FAILPOINTS_DIR` names a folder, a point kills only while the folder has no file of
the point's name, and creates one when it kills. So a supervised process is killed once and then
restarts undisturbed. A test counts the kills, and arms the point again by removing the file.

Names are `<part of the program>.<moment>`; they are listed where they are hit. A point of `is_asked` kills nothing: the code itself
fails there. `capture.decode.<schema>.<table>` makes capture unable to decode the table's next changes.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Final

VARIABLE: Final = "MILLSTREAM_FAILPOINTS"
WITNESS_VARIABLE: Final = "MILLSTREAM_FAILPOINTS_DIR"

_lock: Final = threading.Lock()


_SIGNALS: Final = {"": signal.SIGKILL, "kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def _parse(text: str) -> dict[str, tuple[int, signal.Signals]]:
    """Return the remaining hits and the signal by name.

    Raises `ValueError` for a bad count, `KeyError` for another signal.
    """
    left: dict[str, tuple[int, signal.Signals]] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, rest = part.partition(":")
        count, _, done = rest.partition(":")
        left[name] = int(count or "1"), _SIGNALS[done]
    return left


_left: dict[str, tuple[int, signal.Signals]] = _parse(os.environ.get(VARIABLE, ""))


def hit(name: str) -> None:
    """Hit a point: return at once, unless the environment asks for the process to die or to halt here."""
    if not _left:
        return
    with _lock:
        if name not in _left:
            return
        count, sent = _left[name]
        if sent is signal.SIGSTOP and count <= 0:
            return  # it was resumed
        _left[name] = count - 1, sent
        if count > 1 or not _leave_witness(name):
            return
    os.kill(os.getpid(), sent)


def is_asked(name: str) -> bool:
    """Return whether the environment asks the code to fail at a point, which counts as a hit."""
    if not _left:
        return False
    with _lock:
        count, sent = _left.get(name, (0, signal.SIGKILL))
        if count <= 0:
            return False
        _left[name] = count - 1, sent
        return count == 1


def _leave_witness(name: str) -> bool:
    """Record that the process is killed here; return False if there is a witness file already."""
    folder = os.environ.get(WITNESS_VARIABLE)
    if folder is None:
        return True
    try:
        os.close(os.open(f"{folder}/{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True
