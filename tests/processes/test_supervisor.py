from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream.backoff import Backoff
from millstream.processes import supervisor
from millstream.processes.supervisor import Event, PartState, SupervisedProcess, Supervisor

QUICK = Backoff(first_s=0.02, most_s=0.1, jitter=0)

WORKER = """
import os, sys
from millstream.processes.child_process import Lifeline
from millstream.errors import ConfigError, DiskFull, MillstreamError, SourceError
line = Lifeline()
with line.held():
    if os.path.exists(sys.argv[-1]): raise ConfigError("the file is being edited")
    line.tell("ready", {"pid": os.getpid()})
    if "refuse" in sys.argv: raise SourceError("wrong password", code="source_authentication_failed")
    if "flaky" in sys.argv: raise SourceError("nobody there", code="source_unreachable")
    if "taken" in sys.argv: raise MillstreamError("can't listen", code="address_in_use")
    if "full" in sys.argv: raise DiskFull("no space")
    if "bug" in sys.argv: assert 1 > 2, "an invariant"
    if "done" in sys.argv: line.tell("outcome", {"rows": 7}); sys.exit(0)
    heard = line.drain if "drains" in sys.argv else line.stop
    heard.wait()
    line.tell("outcome", {"stopped": line.stop.is_set()})
"""


def part(name: str, *words: str, may_end: bool = False, errors_max: int | None = None) -> SupervisedProcess:
    return SupervisedProcess(name, [sys.executable, "-c", WORKER, *words], may_end=may_end, errors_max=errors_max)


class Watch:
    """Runs a supervisor on the test's own (main) thread and acts on its events."""

    def __init__(self, *parts: SupervisedProcess, on: Callable[[Watch, Event], None], patience_s: float = 20) -> None:
        self.events: list[Event] = []
        self._on = on
        self.supervisor = Supervisor(parts, on_event=self._event, backoff=QUICK, patience_s=patience_s)

    def _event(self, event: Event) -> None:
        self.events.append(event)
        self._on(self, event)

    def run(self) -> None:
        self.supervisor.run()

    def facts(self, name: str, what: str) -> list[dict[str, Any]]:
        return [facts for part, kind, facts in self.events if (part, kind) == (name, what)]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z" if Path("/proc").is_dir() else True
    except (ProcessLookupError, FileNotFoundError):  # it may have ended between the two
        return False


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        threading.Event().wait(0.02)


def test_a_part_that_is_killed_is_started_again_and_the_others_live_on() -> None:
    def on(watch: Watch, event: Event) -> None:
        name, what, facts = event
        if (name, what) == ("a", "ready") and len(watch.facts("a", "ready")) < 3:
            os.kill(facts["pid"], signal.SIGKILL)
        elif len(watch.facts("a", "ready")) == 3 and watch.facts("b", "ready"):
            watch.supervisor.stop()

    watch = Watch(part("a"), part("b"), on=on)
    watch.run()
    assert [d["exit_code"] for d in watch.facts("a", "died")] == [-signal.SIGKILL] * 2
    assert watch.facts("a", "died")[1]["restart_in_s"] > watch.facts("a", "died")[0]["restart_in_s"]
    assert len(watch.facts("b", "started")) == 1
    assert all(r.state is PartState.ENDED for r in watch.supervisor.parts.values())
    assert watch.supervisor.parts["b"].outcome == {"stopped": True}


def test_an_error_that_only_a_person_can_mend_gives_the_part_up_and_the_rest_goes_on() -> None:
    def on(watch: Watch, _: Event) -> None:
        if watch.facts("a", "given_up") and watch.facts("b", "ready"):
            watch.supervisor.stop()

    watch = Watch(part("a", "refuse"), part("b"), on=on)
    watch.run()
    assert watch.facts("a", "given_up")[0]["code"] == "source_authentication_failed"
    assert watch.supervisor.parts["a"].state is PartState.GIVEN_UP
    assert watch.supervisor.parts["b"].outcome == {"stopped": True}


def test_a_part_that_has_worked_waits_for_a_configuration_that_is_being_edited(tmp_path: Path) -> None:
    """A part that died while the file was half saved was given up, and nothing was captured until the next run."""
    edited = tmp_path / "edited"

    def on(watch: Watch, event: Event) -> None:
        name, what, facts = event
        if (name, what) == ("a", "ready") and len(watch.facts("a", "ready")) == 2:
            watch.supervisor.stop()
        elif (name, what) == ("a", "ready"):
            edited.touch()
            os.kill(facts["pid"], signal.SIGKILL)
        elif (name, what) == ("a", "died") and len(watch.facts("a", "died")) == 3:
            edited.unlink()

    watch = Watch(part("a", str(edited)), on=on)
    watch.run()
    assert [(died["error"] or {}).get("code") for died in watch.facts("a", "died")] == [None, "config", "config"]
    assert watch.supervisor.parts["a"].outcome == {"stopped": True}
    edited.touch()
    refused = Watch(part("a", str(edited)), on=lambda *_: None)
    refused.run()
    assert refused.supervisor.parts["a"].state is PartState.GIVEN_UP


def test_an_error_that_may_pass_is_tried_again() -> None:
    def on(watch: Watch, _: Event) -> None:
        if len(watch.facts("a", "died")) == 2:
            watch.supervisor.stop()

    watch = Watch(part("a", "flaky"), on=on)
    watch.run()
    assert watch.facts("a", "died")[0]["error"]["code"] == "source_unreachable"


def test_a_full_disk_is_waited_for_though_a_person_has_to_make_room() -> None:
    def on(watch: Watch, _: Event) -> None:
        if len(watch.facts("a", "died")) == 2:
            watch.supervisor.stop()

    watch = Watch(part("a", "full"), on=on)
    watch.run()
    assert watch.facts("a", "died")[0]["error"]["code"] == "disk_full"
    assert not watch.facts("a", "given_up")


def test_an_address_that_is_taken_is_waited_for() -> None:
    def on(watch: Watch, _: Event) -> None:
        if len(watch.facts("a", "died")) == 2:
            watch.supervisor.stop()

    watch = Watch(part("a", "taken"), on=on)
    watch.run()
    assert watch.facts("a", "died")[0]["error"]["code"] == "address_in_use"
    assert not watch.facts("a", "given_up")


def test_an_error_that_may_pass_is_tried_only_so_often_where_that_is_asked_for() -> None:
    watch = Watch(part("a", "flaky", errors_max=3), on=lambda *_: None)
    watch.run()
    assert len(watch.facts("a", "started")) == 3
    assert watch.facts("a", "given_up")[0]["code"] == "source_unreachable"


def test_a_long_life_without_progress_counts_for_nothing_where_a_job_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_HEALTHY_AFTER_S", 0.0)
    watch = Watch(part("a", "flaky", errors_max=3), on=lambda *_: None)
    watch.run()
    assert len(watch.facts("a", "started")) == 3


def test_a_bug_is_told_too_and_does_not_repeat_for_ever_where_a_job_waits() -> None:
    watch = Watch(part("a", "bug", errors_max=2), on=lambda *_: None)
    watch.run()
    assert watch.facts("a", "given_up")[0]["message"] == "AssertionError: an invariant"


def test_a_part_may_end_by_itself_and_another_is_told_to_drain() -> None:
    def on(watch: Watch, event: Event) -> None:
        if event[:2] == ("a", "ended"):
            watch.supervisor.tell("b", "drain")

    watch = Watch(part("a", "done", may_end=True), part("b", "drains"), on=on)
    watch.run()
    assert watch.supervisor.parts["a"].outcome == {"rows": 7}
    assert watch.supervisor.parts["b"].outcome == {"stopped": False}


def test_a_part_that_is_started_again_hears_its_word_again() -> None:
    def on(watch: Watch, event: Event) -> None:
        if event[:2] == ("a", "ready") and len(watch.facts("a", "ready")) == 1:
            watch.supervisor.parts["a"].word = "drain"  # sent, but it died before it received it
            os.kill(event[2]["pid"], signal.SIGKILL)

    watch = Watch(part("a", "drains"), on=on)
    watch.run()
    assert watch.supervisor.parts["a"].state is PartState.ENDED


def test_a_part_that_does_not_drain_in_time_is_killed() -> None:
    def on(watch: Watch, event: Event) -> None:
        if event[:2] == ("a", "ready"):
            watch.supervisor.stop()

    watch = Watch(part("a", "drains"), on=on, patience_s=0.2)
    watch.run()
    assert watch.facts("a", "ended")[0]["exit_code"] == -signal.SIGKILL


def test_a_process_that_the_system_can_not_start_now_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that died while the system had no memory or no descriptor was given up: nothing was captured until the next run."""
    lacks = [errno.EMFILE, errno.ENOMEM, errno.EAGAIN]
    pipe = os.pipe

    def lacking() -> tuple[int, int]:
        if watch.facts("a", "ready") and watch.facts("b", "ready") and lacks:
            number = lacks.pop()
            raise OSError(number, os.strerror(number))
        return pipe()

    def on(watch: Watch, event: Event) -> None:
        ready = watch.facts("a", "ready")
        if event[1] == "ready" and len(ready) == 1 and watch.facts("b", "ready"):
            os.kill(ready[0]["pid"], signal.SIGKILL)
        elif len(ready) == 2:
            watch.supervisor.stop()

    monkeypatch.setattr(os, "pipe", lacking)
    watch = Watch(part("a"), part("b"), on=on)
    watch.run()
    died = watch.facts("a", "died")
    assert [(facts["error"] or {}).get("code") for facts in died] == [None, *["system_limit"] * 3]
    assert [facts["exit_code"] for facts in died] == [-signal.SIGKILL, None, None, None]
    assert watch.supervisor.parts["b"].outcome == {"stopped": True}


def test_a_program_that_is_not_there_is_given_up(tmp_path: Path) -> None:
    watch = Watch(SupervisedProcess("a", [str(tmp_path / "nothing")]), on=lambda *_: None)
    watch.run()
    assert watch.supervisor.parts["a"].state is PartState.GIVEN_UP
    assert watch.facts("a", "given_up")[0]["hint"]


SUPERVISOR = """
import sys
from millstream.processes.supervisor import SupervisedProcess, Supervisor
worker = sys.argv[1]
def tell(event):
    if event[1] in ("ready", "stopping", "outcome"): print(event[1], event[2].get("pid"), flush=True)
supervisor = Supervisor([SupervisedProcess("a", [sys.executable, "-c", worker]), SupervisedProcess("b", [sys.executable, "-c", worker])], on_event=tell)
supervisor.run()
print("end", supervisor.interruptions, flush=True)
"""


def start_supervisor() -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, WORKER], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    return process, [int(process.stdout.readline().split()[1]) for _ in range(2)]


def test_sigkill_of_the_supervisor_ends_its_parts() -> None:
    process, children = start_supervisor()
    assert all(map(alive, children))
    process.kill()
    process.communicate(timeout=120)
    until(lambda: not any(map(alive, children)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_supervisor_alone_drains_all(number: signal.Signals) -> None:
    process, children = start_supervisor()
    process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    assert out.startswith("stopping ")
    assert out.count("outcome") == 2
    assert out.endswith("end 1\n")
    assert process.returncode == 0
    assert not any(map(alive, children))


INTERRUPTED_WAIT = """
import os, signal, threading
from millstream.processes.child_process import Lifeline
lifeline = Lifeline()
with lifeline.held():
    with lifeline.stop._cond:  # as inside `stop.wait`, a few instructions before it sleeps
        os.kill(os.getpid(), signal.SIGTERM)
    print(lifeline.stop.wait(30))
"""


def test_a_signal_in_the_middle_of_a_wait_is_heard() -> None:
    """The handler set the event itself, whose lock the wait held: the process stood still until it was killed."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_WAIT], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "True\n", done.stderr
