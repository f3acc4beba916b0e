"""The Spark started on this machine: pyspark's own, without the zipped Python modules that its workers would read.

Spark puts `python/lib/pyspark.zip` at the front of the path of every Python process that it starts.
Python keeps no byte code for a zip, so each process compiled pyspark again. It took two thirds of
a second of a core, five times between a start and the first batch, out of the ten seconds that
Spark gives a Python process to answer. Without that file, workers import the package that this
process imported.

Spark uses the variable SPARK_HOME. So it gets a folder that looks like its home but has no
`python`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyspark

_VARIABLE: Final = "SPARK_HOME"
_FETCHED: Final = "spark-distribution"
"""The folder of the other Spark that pyspark starts if it was installed for another Hadoop."""
_NEEDED: Final = "bin", "conf", "jars"


@contextlib.contextmanager
def without_zipped_modules(cache: Path) -> Iterator[None]:
    """Make a Spark started inside of the block import the installed modules in its workers.

    A Spark that SPARK_HOME names stays as it is.

    Args:
        cache: a writable folder; it has to stay as long as Spark runs.

    Concurrency: as of the environment: one caller at a time. Any number of processes may share
    `cache`.
    """
    own = Path(pyspark.__file__).absolute().parent
    if os.environ.get(_VARIABLE) or (own / _FETCHED).exists() or not (own / "jars").is_dir():
        yield
        return
    os.environ[_VARIABLE] = str(_mirrored(own, cache))
    try:
        yield
    finally:
        del os.environ[_VARIABLE]


def _mirrored(own: Path, cache: Path) -> Path:
    """Make (or find again) a folder in `cache` that has everything of Spark's home except Python."""
    mirror = cache / f"spark-{hashlib.sha256(os.fsencode(own)).hexdigest()[:12]}"
    mirror.mkdir(parents=True, exist_ok=True)
    for name in _NEEDED:
        if (own / name).is_dir():
            with contextlib.suppress(FileExistsError):
                (mirror / name).symlink_to(own / name)
    return mirror
