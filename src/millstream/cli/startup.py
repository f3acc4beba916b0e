"""Fast starts of commands: without pandas, and without garbage collection during imports.

If pandas is installed, pyarrow imports it with the first value that might be pandas's. That takes longer
than most commands do, and nothing in them uses it.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


_WITHOUT_PANDAS: Final = frozenset({"millstream", "pyarrow", "deltalake"})
"""Packages that look for pandas and go on without it."""


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
