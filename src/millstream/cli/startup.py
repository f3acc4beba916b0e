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
    """Finds no pandas until Spark is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise for pandas, as if it weren't installed; leave everything else to others."""
        del path, target
        if fullname == "pandas" and "pyspark" not in sys.modules:
            raise ModuleNotFoundError("pandas is left out of commands", name=fullname)
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


@contextmanager
def without_pandas() -> Iterator[None]:
    """Leave pandas out: pyarrow, which looks for it once, concludes that it isn't installed."""
    finder = _WithoutPandas()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
