"""Feed changed inputs to decoders under one rule: a value or a typed error, soon, in little memory.

    python -m tests.fuzz.harness [--targets NAME,NAME] [--seed N] [--count N | --seconds S] [--findings FOLDER] [--unchecked]

Targets run in their own process. There numba checks every index (NUMBA_BOUNDSCHECK) unless `--unchecked` is
given, and the address space is bounded. An input that takes many seconds ends the process. So a crash of the interpreter is a
finding as well. An input that breaks the rule is written to the folder of findings, as
`<target>/<hash>`. Once the defect is fixed, the input belongs in `tests/fuzz/corpus/<target>`. The exit
code is 1 if there is a finding.

Input number n of a seed is always the same, whichever inputs ran before it.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import itertools
import mmap
import os
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

from tests.fuzz.mutation import mutate

if TYPE_CHECKING:
    from tests.fuzz.targets import Target

ROOT: Final = Path(__file__).resolve().parents[2]
CORPUS: Final = Path(__file__).parent / "corpus"
SECONDS_MAX: Final = 30
"""Limit in seconds for one input: thousands of times what any input takes, on a busy machine."""
MORE_MEMORY: Final = 2 << 30
"""Address space in bytes above what the imports take. A decoder that needs more for an input of some KiB
trusts a length in it.
"""
FINDINGS_MAX: Final = 10
INPUT_MAX: Final = 1 << 20
_FOUND: Final = 3
"""Exit code of a bounded process that had findings and went on; with 1 faulthandler ends a process that hangs."""
_CURRENT: Final = struct.Struct("<II")
"""Number of the running target, and length of its input; the input follows."""


def main(arguments: list[str]) -> int:
    """Run targets; return 1 if one broke the rule."""
    options = _parse(arguments)
    if options.inside:
        return _run_inside(options)
    from tests.fuzz.targets import TARGETS

    waiting = options.targets.split(",") if options.targets else list(TARGETS)
    broken = False
    while waiting:
        with tempfile.NamedTemporaryFile() as current:
            current.truncate(_CURRENT.size + INPUT_MAX)
            command = [sys.executable, "-m", "tests.fuzz.harness", *arguments, "--targets", ",".join(waiting)]
            code = subprocess.run(
                [*command, "--inside", current.name],
                cwd=ROOT,
                env=environment(unchecked=options.unchecked),
                check=False,
            ).returncode
            broken = broken or code != 0
            if code in {0, _FOUND}:
                break
            number, length = _CURRENT.unpack(current.read(_CURRENT.size))
            keep(Path(options.findings), waiting[number], current.read(length), f"the process ended with {code}")
            waiting = waiting[number + 1 :]
    return 1 if broken else 0


def environment(*, unchecked: bool = False) -> dict[str, str]:
    """Return an environment in which numba checks indexes, with its own cache of machine code; or the usual one."""
    if unchecked:
        return os.environ | {"PYTHONFAULTHANDLER": "1"}
    whose = f"{os.getuid()}-{hashlib.sha256(os.fsencode(ROOT)).hexdigest()[:8]}"
    cache = Path(tempfile.gettempdir()) / f"millstream-fuzz-{whose}"
    return os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(cache), "PYTHONFAULTHANDLER": "1"}


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Feed changed inputs to decoders.")
    parser.add_argument("--targets", default="", help="names, with commas; all where it isn't given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000, help="inputs for each target, fewer for slow ones")
    parser.add_argument("--seconds", type=float, help="for each target, instead of a count")
    parser.add_argument("--input-seconds", type=int, default=SECONDS_MAX, help="what one input may take")
    parser.add_argument("--findings", default=str(ROOT / ".cache" / "fuzz"))
    parser.add_argument("--unchecked", action="store_true", help="use the usual machine code: none is compiled for it")
    parser.add_argument("--inside", metavar="FILE", help="set by the harness itself: this is the bounded process")
    return parser.parse_args(arguments)


def keep(findings: Path, name: str, data: bytes, why: str) -> None:
    """Write an input that breaks the rule, and report it."""
    file = findings / name / hashlib.sha256(data).hexdigest()[:16]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    print(f"FINDING {name}: {why}\n  input: {file} ({len(data)} bytes)", flush=True)


def _run_inside(options: argparse.Namespace) -> int:
    from tests.fuzz.targets import PLANTED, TARGETS

    chosen = {name: (TARGETS | PLANTED)[name] for name in options.targets.split(",")}
    seeds = {name: [*target.seeds(), *corpus(name)] for name, target in chosen.items()}
    with Path(options.inside).open("r+b") as file:
        current = mmap.mmap(file.fileno(), 0)
    for target in chosen.values():  # compiles everything needed, before anything is bounded
        for seed in target.seeds():
            target.attempt(seed)
    bound_memory()
    found = [_fuzz(number, name, chosen[name], seeds[name], options, current) for number, name in enumerate(chosen)]
    return _FOUND if any(found) else 0


def _fuzz(
    place: int, name: str, target: Target, seeds: list[bytes], options: argparse.Namespace, current: mmap.mmap
) -> int:
    """Run one target; return how many places broke the rule."""
    started = time.monotonic()
    found: set[str] = set()
    done = 0
    for number, data in enumerate(_inputs(name, target, seeds, options)):
        current[: _CURRENT.size + len(data)] = _CURRENT.pack(place, len(data)) + data
        faulthandler.dump_traceback_later(options.input_seconds, exit=True)
        why = target.attempt(data)
        faulthandler.cancel_dump_traceback_later()
        if why is not None and why.partition("\n")[0] not in found:
            found.add(why.partition("\n")[0])
            keep(Path(options.findings), name, data, f"number {number} of seed {options.seed}: {why}")
        done += 1
        if len(found) >= FINDINGS_MAX or (
            options.seconds is not None and time.monotonic() - started >= options.seconds
        ):
            break
    print(f"{name}: {done} inputs in {time.monotonic() - started:.1f} s, {len(found)} findings", flush=True)
    return len(found)


def _inputs(name: str, target: Target, seeds: list[bytes], options: argparse.Namespace) -> Iterator[bytes]:
    """Yield the seeds as they are, then changed ones."""
    yield from seeds
    numbers = itertools.count() if options.seconds is not None else range(int(options.count * target.share))
    for number in numbers:
        rng = Random(f"{options.seed} {name} {number}")
        data = mutate(rng, rng.choice(seeds), seeds)[:INPUT_MAX]
        yield target.mend(data) if target.mend is not None and rng.random() < 0.8 else data


def corpus(name: str) -> list[bytes]:
    """Return inputs that broke the rule once."""
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


def bound_memory() -> None:
    """Bound how much more address space this process can take from here on."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        limit = int(statm.read_text().split()[0]) * resource.getpagesize() + MORE_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
