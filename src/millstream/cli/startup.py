"""Fast starts of commands: without pandas, and without garbage collection during imports.

If pandas is installed, pyarrow imports it with the first value that might be pandas's. That takes longer
than most commands do, and nothing in them uses it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _WithoutPandas(MetaPathFinder):
    """Finds no pandas."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise for pandas; leave everything else to others."""
        del path, target
        if fullname == "pandas":
            raise ImportError("left out")
        return None


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


def leave_pandas_out() -> None:
    """Have pyarrow conclude that there is no pandas.

    It looks once per process, when it first meets a value of a type that could be pandas's.
    """
    import pyarrow as pa

    finder = _WithoutPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([1])
        pa.scalar(1)
    finally:
        sys.meta_path.remove(finder)
