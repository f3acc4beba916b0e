"""Points in the code at which a test may kill the process, or halt it, named in the environment.

`MILLSTREAM_FAILPOINTS="capture.before_confirm:2,wal.before_fsync"` kills the process by SIGKILL the second time that it
comes to the first point, and the first time that it comes to the second; `wal.after_fsync:3:stop` halts it the third time, by
SIGSTOP, until somebody lets it go on. Nothing is done, and next to nothing spent,
where the variable is unset. Child processes inherit it, each with counts of its own. Where
`MILLSTREAM_FAILPOINTS_DIR` names a folder too, a point kills only while no file of its name lies there, and leaves one
when it does: so a supervised process may be killed once, restarted and left in peace, and a test counts its kills and
arms the point again by removing the file.

Names are `<room>.<moment>`; they are listed where they are hit.
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
    """Hits left by name, and the signal. `ValueError` where a count is no number, `KeyError` for another signal."""
    left: dict[str, tuple[int, signal.Signals]] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, rest = part.partition(":")
        count, _, done = rest.partition(":")
        left[name] = int(count or "1"), _SIGNALS[done]
    return left


_left: dict[str, tuple[int, signal.Signals]] = _parse(os.environ.get(VARIABLE, ""))


def hit(name: str) -> None:
    """Come to a point: return at once, unless the environment asks for the process to die or to halt here."""
    if not _left:
        return
    with _lock:
        if name not in _left:
            return
        count, sent = _left[name]
        if sent is signal.SIGSTOP and count <= 0:
            return  # it was let go on
        _left[name] = count - 1, sent
        if count > 1 or not _leave_witness(name):
            return
    os.kill(os.getpid(), sent)


def _leave_witness(name: str) -> bool:
    """Say that the process is killed here; False where a witness lies there already."""
    folder = os.environ.get(WITNESS_VARIABLE)
    if folder is None:
        return True
    try:
        os.close(os.open(f"{folder}/{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True
