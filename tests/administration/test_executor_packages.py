"""The packages for executors of another platform are its wheels, of the versions that are installed here."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import millstream
from millstream.administration.executor_packages import _distributions, pack_executor_packages
from millstream.errors import UsageError

PLATFORM = "manylinux_2_28_riscv64"


def wheel(folder: Path, name: str, version: str) -> None:
    """Write a wheel with one module, of a platform that this machine isn't."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    plain = name.lower().replace("-", "_")
    info = f"{plain}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{plain}-{version}-{python}-{python}-{PLATFORM}.whl", "w") as file:
        file.writestr(f"{plain}_of_there/__init__.py", f"version = {version!r}")
        file.writestr(f"{plain}-{version}.data/platlib/{plain}_library.so", "binary")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(
            f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {python}-{python}-{PLATFORM}\n"
        )
        file.writestr(f"{info}/RECORD", "")


@pytest.mark.long
def test_wheels_of_the_named_platform_are_packed_with_millstream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = {str(found.metadata["Name"]): found.version for found in _distributions()}
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name, version in packages.items():
        wheel(wheels, name, version)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    packed = pack_executor_packages(tmp_path / "packages.tar.gz", [PLATFORM])
    assert packed.versions == {"millstream": millstream.__version__} | packages
    with tarfile.open(packed.file) as archive:
        names = set(archive.getnames())
    plain = {name.lower().replace("-", "_") for name in packages}
    assert {f"{name}_of_there/__init__.py" for name in plain} | {f"{name}_library.so" for name in plain} <= names
    assert "millstream/administration/executor_packages.py" in names
    assert "deltalake/__init__.py" not in names, "a package of this machine's platform is in it"
    with pytest.raises(UsageError, match="pip fetched no wheels for win_arm64") as caught:
        pack_executor_packages(tmp_path / "other.tar.gz", ["win_arm64"])
    assert "--platform" in caught.value.hint
    assert not (tmp_path / "other.tar.gz").exists()


@pytest.mark.parametrize("name", ["packages.zip", "packages", "packages.tar.gz.old"])
def test_an_archive_that_spark_would_not_unpack_is_not_made(tmp_path: Path, name: str) -> None:
    """Spark unpacks by a file's name: executors had no packages, and said so much later."""
    with pytest.raises(UsageError, match="Spark would unpack") as caught:
        pack_executor_packages(tmp_path / name)
    assert ".tar.gz" in caught.value.hint
    assert not list(tmp_path.iterdir())
