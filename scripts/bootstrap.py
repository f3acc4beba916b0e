"""Fill `.venv` from the locks in `requirements/`, starting with only a Python and its pip (or uv).

The script installs nothing whose hash isn't in a lock. `requirements/uv.txt` holds uv itself, which pip
fetches. `all.txt` holds the packages that run, test and document Millstream; `build.txt` those that build
source packages, Millstream among them. uv reads no pip settings, so the script translates the machine's mirrors
and certificates for it. It needs nothing of HOME.

It runs before anything is installed: standard library only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "installed"
PRIVATE_UV = VENV / "uv" / "bin" / "uv"
REQUIREMENTS = ROOT / "requirements"
APPS = ("apps/forage",)
"""Applications of Millstream, each a package of its own with the same locks."""
LOCKS = {
    "all.txt": [
        "pyproject.toml",
        *(f"{app}/pyproject.toml" for app in APPS),
        "--all-extras",
        "--group=dev",
        "--group=docs",
        "--no-emit-package=millstream",
    ],
    "build.txt": ["--group=build"],
    "uv.txt": ["--group=bootstrap"],
}

# pip's options on the left, as `pip install --help` spells them, uv's variables on the right, and
# the separator between several values there.
PIP_TO_UV = {
    "index-url": ("UV_DEFAULT_INDEX", ""),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", ""),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", ""),
    "client-cert": ("SSL_CLIENT_CERT", ""),
    "proxy": ("ALL_PROXY", ""),
    "timeout": ("UV_HTTP_TIMEOUT", ""),
}


class BootstrapError(Exception):
    """A problem that the person at the terminal has to fix; printed in one sentence, without a traceback."""


def say(text: str) -> None:
    """Print a message to the person; stdout belongs to the command that make was asked for."""
    print(text, file=sys.stderr, flush=True)


def fingerprint() -> str:
    """Return one hash of everything that the content of `.venv` depends on: locks, metadata, interpreter."""
    digest = hashlib.sha256()
    for folder in (".", *APPS):
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
        metadata = {"project": project["project"], "build": project["build-system"], "hatch": project["tool"]["hatch"]}
        digest.update(json.dumps(metadata, sort_keys=True).encode())
    for lock in LOCKS:
        digest.update((REQUIREMENTS / lock).read_bytes())
    if PYTHON.exists():
        digest.update(os.fsencode(PYTHON.resolve()))
    return digest.hexdigest()


def pip_settings(environment: dict[str, str]) -> dict[str, str]:
    """Return this machine's pip options from its files and variables; the more specific ones win.

    The order is pip's own: `[global]`, `[install]`, then `PIP_…` variables. A Python without pip has only those.
    """
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list", "--disable-pip-version-check"],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    return parse_pip_settings(listing, environment)


def parse_pip_settings(listing: str, environment: dict[str, str]) -> dict[str, str]:
    """Return the options of `pip config list`, or of the variables alone if it is empty, for `pip install`."""
    found: dict[tuple[str, str], str] = {}
    for line in listing.splitlines():
        name, equals, quoted = line.partition("=")
        section, _, option = name.rpartition(".")
        if equals:
            found[section, option] = quoted.strip("'\"").replace("\\n", "\n")
    for name, value in environment.items():
        if name.startswith("PIP_"):
            found[":env:", name.removeprefix("PIP_").lower().replace("_", "-")] = value
    settings: dict[str, str] = {}
    for wanted in ("global", "install", ":env:"):
        settings |= {
            option.removeprefix("default-"): value
            for (section, option), value in found.items()
            if section == wanted and value.strip()
        }
    return settings


def uv_environment() -> dict[str, str]:
    """Return the variables for pip and uv: the user's own, pip's settings in uv's words, a writable cache.

    A variable that the user set for uv wins over pip's setting.
    """
    # Empty is not unset: OpenSSL, pip and uv each treat SSL_CERT_FILE="" differently.
    environment = {name: value for name, value in os.environ.items() if value}
    settings = pip_settings(environment)
    for option, (variable, separator) in PIP_TO_UV.items():
        values = settings.get(option, "").split()
        if option == "find-links":
            # pip ignores a missing folder; uv stops.
            values = [value for value in values if "://" in value or Path(value).exists()]
        if values:
            environment.setdefault(variable, separator.join(values) if separator else values[-1])
    if "UV_INDEX_URL" in os.environ:
        environment.pop("UV_DEFAULT_INDEX", None)
    # As pip does: any index may hold the locked version. The hashes make that safe.
    environment.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
    # A company's own certificate authority is in the system's store, not in uv's.
    environment.setdefault("UV_SYSTEM_CERTS", "1")
    # An active virtual environment of another project is not ours.
    environment.pop("VIRTUAL_ENV", None)
    if not any(name in environment for name in ("UV_CACHE_DIR", "UV_NO_CACHE")):
        environment["UV_CACHE_DIR"] = str(cache_dir(environment))
    if Path(environment.get("UV_CACHE_DIR", ROOT)).stat().st_dev != VENV.stat().st_dev:
        environment.setdefault("UV_LINK_MODE", "copy")  # uv's fallback, without its warning
    return environment


def cache_dir(environment: dict[str, str]) -> Path:
    """Return uv's usual cache, which other projects share; one in the repository if HOME can't be written."""
    base = Path(environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", ROOT)) / ".cache")
    for folder in (base / "uv", ROOT / ".cache" / "uv"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise BootstrapError(f"Neither {base} nor {ROOT} can be written, so there is no place for downloads.")


def run(command: list[str | Path], environment: dict[str, str], *, to: str) -> None:
    """Run a step to its end; its own output goes to stderr."""
    done = subprocess.run(command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
    if done.returncode:
        raise BootstrapError(f"Could not {to}: what {Path(command[0]).name} says above tells why.")


def make_venv() -> None:
    """Make `.venv` if there is none, or none that still runs (its Python may have been upgraded away)."""
    if PYTHON.exists() and subprocess.run([PYTHON, "-c", ""], check=False, capture_output=True).returncode == 0:
        return
    shutil.rmtree(VENV, ignore_errors=True)
    # Without pip: Debian's stock Python can't put it in, and uv needs none.
    run([sys.executable, "-m", "venv", "--without-pip", VENV], dict(os.environ), to="make .venv")


def find_uv(environment: dict[str, str]) -> Path:
    """Return uv: the one on the PATH, else one that pip puts into a folder of its own in `.venv`, by hash."""
    on_path = shutil.which("uv")
    if on_path:
        return Path(on_path)
    wanted = (REQUIREMENTS / "uv.txt").read_bytes()
    marker = PRIVATE_UV.parent / "lock"
    if PRIVATE_UV.exists() and marker.exists() and marker.read_bytes() == wanted:
        return PRIVATE_UV
    pip_python: str | Path = sys.executable
    if subprocess.run([pip_python, "-m", "pip", "--version"], check=False, capture_output=True).returncode:
        pip_python = PYTHON
        run([PYTHON, "-m", "ensurepip"], environment, to="put pip into .venv")
    target = VENV / "uv"
    shutil.rmtree(target, ignore_errors=True)
    options = ["--quiet", "--no-cache-dir", "--disable-pip-version-check", "--no-input", "--root-user-action=ignore"]
    options += ["--no-deps", "--only-binary=:all:", "--require-hashes", "--requirement", str(REQUIREMENTS / "uv.txt")]
    run([pip_python, "-m", "pip", "install", *options, "--target", target], environment, to="install uv with pip")
    marker.write_bytes(wanted)
    return PRIVATE_UV


def install() -> None:
    """Bring `.venv` to the state of the locks, Millstream and its applications included, as editable installs."""
    make_venv()
    if STAMP.exists() and STAMP.read_text() == fingerprint():
        STAMP.touch()
        return
    started = time.monotonic()
    say("Installing Millstream and its locked dependencies into .venv, once: up to 0.6 GB, less what the cache has.")
    environment = uv_environment()
    uv = find_uv(environment)
    install_command: list[str | Path] = [uv, "pip", "install", "--python", PYTHON]
    build = ["--build-constraints", str(REQUIREMENTS / "build.txt")]
    locked = ["--require-hashes", "--requirements", str(REQUIREMENTS / "all.txt")]
    run([*install_command, *build, *locked], environment, to="install the locked packages")
    own = [option for folder in (".", *APPS) for option in ("--editable", str(ROOT / folder))]
    run([*install_command, *build, "--no-deps", *own], environment, to="install Millstream itself")
    compile_packages(environment)
    STAMP.write_text(fingerprint())
    say(f"Installed in {time.monotonic() - started:.0f} s.")


def compile_packages(environment: dict[str, str]) -> None:
    """Compile the packages if Python is configured not to keep byte code, as in many containers.

    Otherwise each of a pipeline's many processes would compile its imports at the start, for seconds.
    """
    if not environment.get("PYTHONDONTWRITEBYTECODE"):
        return
    folders = [*VENV.glob("lib/python*/site-packages"), ROOT / "src", *(ROOT / app / "src" for app in APPS)]
    # A package may hold templates and tests for other Pythons: files that can't be compiled aren't imported either.
    say("Compiling the packages, for a minute or two …")
    command: list[str | Path] = [PYTHON, "-m", "compileall", "-qq", "-j", "0", *folders]
    subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)


def lock(*more: str) -> None:
    """Write the locks from pyproject.toml: for every platform and Python >= 3.11, without any index's address.

    Versions that are locked already stay; `--upgrade` and `--upgrade-package NAME` are uv's own.
    """
    environment = uv_environment()
    uv = find_uv(environment)
    options = ["--quiet", "--universal", "--generate-hashes", "--no-header", "--python-version=3.11", *more]
    for name, sources in LOCKS.items():
        say(f"Locking requirements/{name}")
        output = f"--output-file={REQUIREMENTS / name}"
        run([uv, "pip", "compile", *options, output, *sources], environment, to=f"lock {name}")


def main(arguments: list[str]) -> int:
    """Run `install` or `lock`; 0 when done, 1 when it failed, 2 when something is missing or misspelt."""
    match arguments:
        case ["install"]:
            step: Callable[..., None] = install
        case ["lock", *_]:
            step = lock
        case _:
            say("usage: bootstrap.py install | lock [OPTIONS OF uv pip compile]")
            return 2
    try:
        (ROOT / ".cache").mkdir(exist_ok=True)
        with (ROOT / ".cache" / "bootstrap.lock").open("w") as mutex:
            fcntl.flock(mutex, fcntl.LOCK_EX)  # a second make waits for the first
            step(*arguments[1:])
    except BootstrapError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
