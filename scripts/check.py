"""The steps of `make check`: format, lint, types, layers, house rules, words, reference pages, documentation.

Each step runs to its end, whatever the results of the others; as many run at once as there are cores. One line a
step, in order, after its output if it failed. Exit 0 only if all passed.

    check.py [--only STEP] FOLDER…
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
LONGEST = {"types", "docs"}


def steps(folders: list[str]) -> dict[str, list[str]]:
    """Return the command of every step, by the step's name."""
    python, site = str(BIN / "python"), "docs/_build/html"
    # --keep-going: all broken references at once; -W: each of them is a failure. -E: an unchanged page can break too.
    sphinx = [python, "-m", "sphinx", "--builder=html", "-W", "--keep-going", "-E", "--quiet", "docs", site]
    return {
        "format": [str(BIN / "ruff"), "format", "--check", "--quiet", "--diff", *folders],
        "lint": [str(BIN / "ruff"), "check", "--quiet", *folders],
        "types": [str(BIN / "mypy")],
        "layers": [str(BIN / "lint-imports"), "--no-cache"],
        "rules": [python, "scripts/house_rules.py"],
        "words": [python, "scripts/words.py"],
        "reference": [python, "scripts/reference.py", "--check"],
        "examples": [python, "scripts/doc_examples.py"],
        "docs": sphinx,
    }


def run(command: list[str]) -> tuple[int, str, float]:
    """Run a step; return its exit code, its output, and how many seconds it took."""
    started = time.monotonic()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "160"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, time.monotonic() - started


def main(arguments: list[str]) -> int:
    """Run the chosen steps; 1 if one failed."""
    parser = argparse.ArgumentParser(
        description="Format, lint, types, layers, house rules, words, reference pages, documentation."
    )
    parser.add_argument("--only", choices=list(steps([])), help="one step alone")
    parser.add_argument("folders", nargs="*", default=["src", "tests", "scripts", "docs", "apps"])
    chosen = parser.parse_args(arguments)
    commands = {name: command for name, command in steps(chosen.folders).items() if chosen.only in (None, name)}
    failed = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # The two that take longest begin first, so that no core is idle at the end.
        order = sorted(commands, key=lambda name: name not in LONGEST)
        running = {name: pool.submit(run, commands[name]) for name in order}
        for name in commands:
            code, output, duration_s = running[name].result()
            if code:
                failed.append(name)
                print(output.rstrip(), flush=True)
            print(f"{name:<10} {'FAILED' if code else 'ok':<7} {duration_s:5.1f} s", flush=True)
    print(f"check failed: {', '.join(failed)}" if failed else "check passed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
