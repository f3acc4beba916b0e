"""Fuzzing as in `harness`, led by coverage: atheris (libFuzzer) keeps inputs that reach new lines, and changes those.

    python -m tests.fuzz.guided TARGET --seed N --seconds S [--findings FOLDER]

Only lines of Python lead it. Machine code has the same index checks, and a crash, a hang or too much
memory is a finding.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import atheris
from tests.fuzz.harness import INPUT_MAX, ROOT, SECONDS_MAX, corpus

# Machine code is left out: numba can't compile atheris's calls.
_COMPILED = (
    "codec.pgoutput._row_messages", "codec.pgoutput._value_parsers", "codec.pgoutput._framing", "capture.copying._text_scan",
    "codec.line_protocol._line_scan", "codec.line_protocol._arrange", "codec.line_protocol._floats", "codec.little_endian_words", "codec.line_protocol._names",
    "codec.line_protocol._values",
)  # fmt: skip
with atheris.instrument_imports(include=["millstream"], exclude=[f"millstream.{name}" for name in _COMPILED]):
    from tests.fuzz.targets import TARGETS


class RuleBrokenError(Exception):
    """Raised when a decoder gave neither a value nor a typed error."""


def main() -> None:
    """Run one target; libFuzzer ends the process."""
    parser = argparse.ArgumentParser(description="Feed inputs to a decoder, led by coverage.")
    parser.add_argument("target", choices=list(TARGETS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--findings", default=str(ROOT / ".cache" / "fuzz"))
    options = parser.parse_args()
    target = TARGETS[options.target]
    findings = Path(options.findings) / options.target
    findings.mkdir(parents=True, exist_ok=True)
    start = Path(tempfile.mkdtemp(prefix="millstream-fuzz-"))
    for number, seed in enumerate([*target.seeds(), *corpus(options.target)]):
        (start / str(number)).write_bytes(seed)
        target.attempt(seed)  # compile everything before the run

    def attempt(data: bytes) -> None:
        why = target.attempt(data)
        if why is not None:
            raise RuleBrokenError(why)

    def change(data: bytes, size_max: int, seed: int) -> bytes:
        changed = bytes(atheris.Mutate(data, size_max))
        return changed if target.mend is None or seed % 5 == 0 else target.mend(changed)

    flags = [f"-seed={options.seed}", f"-max_total_time={options.seconds}", f"-timeout={SECONDS_MAX}"]
    flags += ["-rss_limit_mb=4096", f"-max_len={INPUT_MAX}", f"-artifact_prefix={findings}/", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *flags, str(start)], attempt, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
