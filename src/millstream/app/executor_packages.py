"""The packages that Spark's executors need, as one archive: a folder for PYTHONPATH.

They are copied from this Python, so their versions are the driver's. A packed virtual environment would link to a
base Python that workers may lack; these files need any Python of the same minor version and platform.
"""

from __future__ import annotations

import io
import re
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

import millstream
from millstream.errors import UsageError
from millstream.private_files import replacing

EXTRA: Final = ("deltalake",)
"""The extra `executor`: what executors need next to Millstream's own requirements."""
_FOLDER: Final = "millstream-executor"
"""Name of the folder into which Spark unpacks the archive, in each executor's working folder."""
_OWN: Final = ("millstream", "pyspark_millstream")
_UNUSED: Final = re.compile(r"(^|/)(__pycache__|tests|include)/|\.(pyc|pyx|pxd|h)$")
"""Files that no program imports."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class PackedPackages:
    """An archive that was written."""

    file: Path
    versions: dict[str, str]
    """Versions of the packages, by name."""
    size_bytes: int

    def conf(self) -> dict[str, str]:
        """Return the settings of `[spark.conf]` by which executors use it."""
        return {
            "spark.archives": f"{self.file}#{_FOLDER}",
            "spark.executorEnv.PYTHONPATH": _FOLDER,
            "spark.pyspark.python": f"python{sys.version_info.major}.{sys.version_info.minor}",
        }


def pack_executor_packages(file: Path) -> PackedPackages:
    """Write the archive; an existing file is replaced.

    Raises:
        UsageError (`missing_extra`): a package of the extra isn't installed here.
        OSError: the file can't be written.
    """
    file = file.absolute()
    found = list(_distributions())
    with (
        replacing(file, private=False, durable=False) as target,
        tarfile.open(fileobj=target, mode="w:gz", compresslevel=1) as archive,
    ):
        for name in _OWN:
            folder = Path(millstream.__file__).parent.parent / name
            for path in sorted(folder.rglob("*")):
                _add(archive, path, f"{name}/{path.relative_to(folder)}")
        for package in found:
            for entry in package.files or ():
                _add(archive, Path(str(package.locate_file(entry))), str(entry))
    versions = {str(package.metadata["Name"]): package.version for package in found}
    return PackedPackages(file, {"millstream": millstream.__version__} | versions, file.stat().st_size)


def _distributions() -> Iterator[Distribution]:
    """Yield the packages that executors need, and those that they need, without Millstream."""
    waiting = [*_required("millstream"), *((name, False) for name in EXTRA)]
    seen = {"millstream"}
    while waiting:
        name, is_optional = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            yield distribution(name)
        except PackageNotFoundError as error:
            if is_optional:
                continue
            raise UsageError(
                f"executors need {name}, which isn't installed here",
                code="missing_extra",
                hint="pip install 'millstream[executor]'",
                extra="executor",
            ) from error
        waiting += _required(name)


def _required(name: str) -> Iterator[tuple[str, bool]]:
    """Yield the names that a package requires, and whether another platform or Python may not need them."""
    for requirement in distribution(name).requires or ():
        words, _, marker = requirement.partition(";")
        match = _NAME.match(words)
        assert match is not None, "a requirement begins with a name"
        if "extra" not in marker:
            yield match[0].lower().replace("_", "-"), bool(marker)


def _add(archive: tarfile.TarFile, path: Path, name: str) -> None:
    if name.startswith("..") or _UNUSED.search(name) or not path.is_file():
        return
    facts = tarfile.TarInfo(name)
    data = path.read_bytes()
    facts.size, facts.mode = len(data), 0o644
    archive.addfile(facts, io.BytesIO(data))
