"""The packages that Spark's executors need, as one archive: a folder for PYTHONPATH.

They are copied from this Python, so their versions are the driver's. For workers of another platform pip fetches the
same versions. A packed virtual environment would link to a base Python that workers may lack; these files need any
Python of the same minor version, on their platform.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import millstream
from millstream.errors import UsageError
from millstream.errors.missing_extras import missing_extra
from millstream.private_files import replacing

EXTRA: Final = ("deltalake", "obstore", "pyiceberg")
"""The extra `executor`: what executors need next to Millstream's own requirements."""
_IF_INSTALLED: Final = frozenset({"pyiceberg"})
"""Packages of the extra that a driver without them doesn't need in its executors: it can have no lake of that format."""
_FOLDER: Final = "millstream-executor"
"""Name of the folder into which Spark unpacks the archive, in each executor's working folder."""
_SUFFIXES: Final = (".tar.gz", ".tgz")
_OWN: Final = ("millstream", "pyspark_millstream")
_UNUSED: Final = re.compile(r"(^|/)(__pycache__|tests|include)/|\.(pyc|pyx|pxd|h)$")
"""Files that no program imports."""
_DATA: Final = re.compile(r"^[^/]+\.data/(?:purelib|platlib)/")
"""Folder in a wheel whose contents are installed next to its packages."""
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


def pack_executor_packages(file: Path, platforms: Sequence[str] = ()) -> PackedPackages:
    """Write the archive; an existing file is replaced.

    Args:
        platforms: tags of the workers' platform, as in names of wheels (`manylinux_2_28_aarch64`); any of them fits.
            Empty: this machine's.

    Raises:
        UsageError: the file's name isn't that of a compressed tar archive; Spark unpacks by the name.
        UsageError (`missing_extra`): a package of the extra isn't installed here.
        UsageError: pip finds no wheel of a package for the platform.
        OSError: the file can't be written.
    """
    file = file.absolute()
    if not file.name.endswith(_SUFFIXES):
        raise UsageError(
            f"{file.name} isn't the name of an archive that Spark would unpack as one",
            hint=f"End it in {' or '.join(_SUFFIXES)}.",
        )
    found = list(_distributions())
    with (
        replacing(file, private=False, durable=False) as target,
        tarfile.open(fileobj=target, mode="w:gz", compresslevel=1) as archive,
    ):
        for name in _OWN:
            folder = Path(millstream.__file__).parent.parent / name
            for path in sorted(folder.rglob("*")):
                _add(archive, path, f"{name}/{path.relative_to(folder)}")
        if platforms:
            _add_wheels(archive, found, platforms)
        for package in () if platforms else found:
            for entry in package.files or ():
                _add(archive, Path(str(package.locate_file(entry))), str(entry))
    versions = {str(package.metadata["Name"]): package.version for package in found}
    return PackedPackages(file, {"millstream": millstream.__version__} | versions, file.stat().st_size)


def _add_wheels(archive: tarfile.TarFile, packages: Sequence[Distribution], platforms: Sequence[str]) -> None:
    """Add the packages of a platform, fetched by pip from the index that the user has set."""
    wanted = [f"{package.metadata['Name']}=={package.version}" for package in packages]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    fits = [word for platform in platforms for word in ("--platform", platform)]
    with TemporaryDirectory(prefix="millstream-env-") as folder:
        command = [*_pip(), "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        options = ["--only-binary=:all:", "--python-version", version, *fits, "--dest", folder]
        done = subprocess.run([*command, *options, *wanted], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise UsageError(
                f"pip fetched no wheels for {' or '.join(platforms)}: {done.stderr.strip()[-1000:]}",
                hint="Name the platform as in the names of wheels, such as manylinux_2_28_aarch64; --platform may be repeated.",
            )
        for wheel in sorted(Path(folder).glob("*.whl")):
            with zipfile.ZipFile(wheel) as content:
                for name in content.namelist():
                    if not name.endswith("/"):
                        _add_data(archive, _DATA.sub("", name), content.read(name))


def _pip() -> list[str]:
    """Return the command for pip: this Python's, or the one that Python brings along for new environments."""
    if find_spec("pip") is not None:
        return [sys.executable, "-P", "-m", "pip"]
    ensurepip = find_spec("ensurepip")
    folders = [f"{folder}/_bundled" for folder in (ensurepip and ensurepip.submodule_search_locations) or ()]
    folders += filter(None, [sysconfig.get_config_var("WHEEL_PKG_DIR")])  # where Debian and Fedora keep it
    for folder in folders:
        for wheel in sorted(Path(folder).glob("pip-*.whl")):
            return [sys.executable, str(wheel / "pip")]
    raise UsageError(
        "pip fetches the packages of another platform, and isn't installed here",
        code="missing_extra",
        hint="python -m ensurepip, or install pip with the tool that made this environment.",
        extra="pip",
    )


def _distributions() -> Iterator[Distribution]:
    """Yield the packages that executors need, and those that they need, without Millstream."""
    waiting = [*_required("millstream"), *((name, name in _IF_INSTALLED) for name in EXTRA)]
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
            raise missing_extra(f"executors need {name}", "executor") from error
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
    if path.is_file():
        _add_data(archive, name, path.read_bytes())


def _add_data(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    if name.startswith("..") or _UNUSED.search(name):
        return
    facts = tarfile.TarInfo(name)
    facts.size, facts.mode = len(data), 0o644
    archive.addfile(facts, io.BytesIO(data))
