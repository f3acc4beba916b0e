"""For any bytes a decoder gives a value or a typed error.

CI runs a few thousand inputs, and `make soak` new ones for hours.
"""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fuzz.harness import ROOT, environment
from tests.fuzz.targets import PLANTED, TARGETS
from tests.seeds import Seeds

SOAK_S = int(os.environ.get("MILLSTREAM_SOAK_SECONDS") or 900)
"""Seconds for each target and each way."""


def run(
    module: str, *arguments: str, findings: Path, timeout_s: float | None = 240
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments, "--findings", str(findings)]
    environ = environment(unchecked="--unchecked" in arguments)
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False
    )


@pytest.mark.parametrize("name", TARGETS)
def test_valid_inputs_are_decoded(name: str):
    for seed in TARGETS[name].seeds():
        TARGETS[name].decode(seed)


def test_changed_inputs_and_those_that_broke_the_rule_once_give_a_value_or_a_typed_error(tmp_path: Path, seeds: Seeds):
    """`make test` spares the minute in which machine code that checks indexes is compiled."""
    count, seed = str(seeds.count(400, quick=4)), str(seeds.kept_or_new(0))
    unchecked = ["--unchecked"] if seeds.is_quick else []
    done = run("tests.fuzz.harness", "--count", count, "--seed", seed, *unchecked, findings=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == list(TARGETS)


@pytest.mark.siege
def test_the_harness_finds_each_way_to_break_the_rule(tmp_path: Path):
    names = ",".join(PLANTED)
    done = run("tests.fuzz.harness", "--targets", names, "--input-seconds", "1", findings=tmp_path)
    assert done.returncode == 1
    for name in PLANTED:
        (finding, *_) = sorted((tmp_path / name).iterdir())
        assert finding.read_bytes().count(b"*") >= 3, name
    assert "MemoryError" in done.stdout
    assert "IndexError" in done.stdout


@pytest.mark.soak
@pytest.mark.parametrize("name", TARGETS)
def test_soak_changed_inputs(name: str):
    seed = random.SystemRandom().randrange(2**31)
    again = f"python -m tests.fuzz.harness --targets {name} --seed {seed} --seconds {SOAK_S}"
    print(f"\n{again}")
    done = run("tests.fuzz.harness", *again.split()[3:], findings=ROOT / ".cache" / "fuzz", timeout_s=None)
    assert done.returncode == 0, f"{again}\n{done.stdout[-6000:]}{done.stderr[-3000:]}"


@pytest.mark.soak
@pytest.mark.parametrize("name", TARGETS)
def test_soak_inputs_led_by_coverage(name: str):
    assert importlib.util.find_spec("atheris") is not None, (
        "atheris has wheels for Linux on x86-64 only: leave this out with -k"
    )
    seed = random.SystemRandom().randrange(1, 2**31)
    again = f"python -m tests.fuzz.guided {name} --seed {seed} --seconds {SOAK_S}"
    print(f"\n{again}")
    done = run("tests.fuzz.guided", *again.split()[3:], findings=ROOT / ".cache" / "fuzz", timeout_s=None)
    assert done.returncode == 0, f"{again}\n{done.stdout[-3000:]}{done.stderr[-6000:]}"
