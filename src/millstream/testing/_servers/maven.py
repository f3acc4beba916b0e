"""Artifacts of Maven's repositories, for tests: fetched by `jgo`, pinned by SHA-256, cached outside the project.

`fetch` promises a file whose bytes have the given digest. The choice of the repository is the client's:
jgo knows the default one and the user's mirrors. The download runs in a process of its own, so that
nothing of an HTTP client stays in the caller and its environment isn't touched.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from millstream.errors import MillstreamError, Retry

_DOWNLOAD_TIMEOUT_S = 300


class ArtifactUnavailable(MillstreamError):
    """The artifact isn't in the cache and couldn't be fetched, or differs from the pinned one."""

    code = "artifact_unavailable"
    retry = Retry.OPERATOR
    default_hint = "Fetching takes the Python package jgo and a reachable Maven repository."


def cache_dir() -> Path:
    """Return a writable folder for things that can be fetched again; HOME isn't needed.

    `MILLSTREAM_CACHE_DIR` if set, otherwise `millstream` in the user's cache folder, or in the temporary
    one.
    """
    explicit = os.environ.get("MILLSTREAM_CACHE_DIR")
    candidates = [Path(explicit)] if explicit else []
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        candidates.append(Path(xdg) / "millstream")
    if home := os.environ.get("HOME"):
        candidates.append(Path(home) / ".cache" / "millstream")
    candidates.append(Path(tempfile.gettempdir()) / f"millstream-cache-{os.geteuid()}")
    for candidate in candidates:
        try:
            candidate.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        # Another user may have made a folder in a shared temporary directory.
        if os.access(candidate, os.W_OK | os.X_OK) and candidate.stat().st_uid == os.geteuid():
            return candidate
    raise ArtifactUnavailable(f"no writable cache folder among {[str(c) for c in candidates]}")


def fetch(group: str, artifact: str, version: str, *, sha256: str) -> Path:
    """Return the path of a jar with exactly this digest, from the cache or fetched now.

    Args:
        group: of the artifact.
        artifact: its name.
        version: with `:` and a classifier behind it, if it has one.
        sha256: the digest.

    Raises:
        ArtifactUnavailable: it isn't cached and can't be fetched (no `jgo`, no network), or its bytes
            differ.

    Concurrency: any number of processes; each download goes to a folder of its own and is moved into
    place.
    """
    target = cache_dir() / "maven" / group / f"{artifact}-{version.replace(':', '-')}.jar"
    if target.is_file() and _sha256(target) == sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fetched = _download(group, artifact, version, Path(folder))
        digest = _sha256(fetched)
        if digest != sha256:
            raise ArtifactUnavailable(f"{group}:{artifact}:{version} has SHA-256 {digest}, expected {sha256}")
        fetched.replace(target)
    return target


def _download(group: str, artifact: str, version: str, folder: Path) -> Path:
    env = dict(os.environ)
    # requests, which jgo uses, doesn't know SSL_CERT_FILE, the variable for a machine's own certificate
    # authority.
    if "SSL_CERT_FILE" in env:
        env.setdefault("REQUESTS_CA_BUNDLE", env["SSL_CERT_FILE"])
    command = [sys.executable, "-m", __name__, group, artifact, version, str(folder)]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ArtifactUnavailable(f"{group}:{artifact}:{version}: not fetched in {_DOWNLOAD_TIMEOUT_S} s") from error
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise ArtifactUnavailable(f"{group}:{artifact}:{version} can't be fetched: {last[0]}")
    return Path(done.stdout.strip().splitlines()[-1])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _main() -> None:
    """Download `group artifact version folder` in a process of its own; print the file's path."""
    try:
        from jgo.config import GlobalSettings
        from jgo.maven import MavenContext
        from jgo.maven._core import DEFAULT_REMOTE_REPOS
    except ImportError as error:
        raise SystemExit(f"it takes `jgo`, which isn't installed here ({error})") from error
    group, artifact, version, folder = sys.argv[1:]
    context = MavenContext(
        repo_cache=Path(folder),
        remote_repos={**GlobalSettings.load().repositories, **DEFAULT_REMOTE_REPOS},
        timeout=60,
    )
    number, _, classifier = version.partition(":")
    sys.stdout.write(f"{context.project(group, artifact).at_version(number).artifact(classifier).resolve()}\n")


if __name__ == "__main__":
    _main()
