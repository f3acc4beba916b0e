"""Starts of commands: without pandas, without garbage collection during imports, and with an answer to early signals.

If pandas is installed, pyarrow imports it with the first value that might be pandas's. That takes longer
than most commands do, and nothing in them uses it.
"""

from __future__ import annotations

import gc
import inspect
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType


_WITHOUT_PANDAS: Final = frozenset({"millstream", "pyarrow", "deltalake"})
"""Packages that look for pandas and go on without it."""
_INTERRUPTED: Final = 130
_ENDED_BY_SIGNALS: Final = (("run",), ("serve",), ("capture", "run"), ("pipeline", "run"))
"""Commands that run until a signal."""


class _WithoutPandas(MetaPathFinder):
    """Finds no pandas for Millstream's modules and pyarrow's; others, such as Spark or another package's sink, have it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise for pandas, as if it weren't installed; leave everything else to others."""
        del path, target
        if fullname == "pandas" and _importer() in _WITHOUT_PANDAS:
            raise ModuleNotFoundError("pandas is left out of commands", name=fullname)
        return None


def _importer() -> str:
    """Return the package whose code imports something, or calls compiled code that does."""
    frame = inspect.currentframe()
    package = ""
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if frame.f_globals is not globals() and package not in {"importlib", "_frozen_importlib"}:
            break
        frame = frame.f_back
    return package


@contextmanager
def importing() -> Iterator[None]:
    """Import without garbage collection, and freeze the imported objects: they stay until the end.

    Collecting them took a sixth of the start, and as long once more at the end.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def without_pandas() -> Iterator[None]:
    """Leave pandas out: pyarrow, which looks for it once, concludes that it isn't installed."""
    finder = _WithoutPandas()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextmanager
def ended_by_signals(arguments: Sequence[str]) -> Iterator[None]:
    """Let SIGINT and SIGTERM end a command that runs until a signal, also before its own handlers are there.

    Imports take a second, in which SIGTERM would kill the process. Nothing has begun by then, so there is nothing to
    drain. A supervised part is left alone: its supervisor takes an end with exit code 0 for the end of its work.
    """
    # Not imported for its constant, because that takes longer than everything here.
    if not _runs_until_a_signal(arguments) or "MILLSTREAM_REPORT_FD" in os.environ:
        yield
        return

    def leave(number: int, frame: object) -> NoReturn:
        del number, frame
        raise SystemExit(_INTERRUPTED if "--until-caught-up" in arguments else 0)

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _runs_until_a_signal(arguments: Sequence[str]) -> bool:
    words: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--home":
            next(rest, None)
        elif not argument.startswith("-"):
            words.append(argument)
    return any(tuple(words[: len(command)]) == command for command in _ENDED_BY_SIGNALS)
