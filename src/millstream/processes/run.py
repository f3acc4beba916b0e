"""`run`: all parts of a home under one supervisor, until a signal, or until everything has caught up."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from millstream.errors import ConfigError, LakeUnavailable
from millstream.errors.missing_extras import missing_extra
from millstream.home.home import Home
from millstream.home.paths import HomePaths
from millstream.processes.role_locks import RoleLock, holder
from millstream.processes.supervisor import Event, PartState, SupervisedProcess, Supervisor

_ERRORS_MAX: Final = 5
"""How often a part of `--until-caught-up` may end with the same kind of error before the job fails."""
_KILL_S: Final = 5.0
"""How much longer than its server a run waits for parts that were told to stop: the server may have to kill processes."""
_TEXT_MAX: Final = 300
"""Characters of each text of a recorded error: all fit in a lock's file."""
_LAKE_GONE: Final = frozenset({LakeUnavailable.code, *LakeUnavailable.codes})
"""Errors for which the pipeline has been patient already, so that a job ends by the first."""


@dataclass(slots=True)
class RunOutcome:
    """The result of a `run`."""

    caught_up: bool
    interrupted: bool
    quarantined: dict[str, str] = field(default_factory=dict)
    """Tables that were quarantined (`stream: schema.table`), each with its reason."""
    fold_errors: dict[str, dict[str, str]] = field(default_factory=dict)
    """`code` and `hint` of those of them that only their fold holds back (`stream: schema.table`)."""
    paused: list[str] = field(default_factory=list)
    """Tables whose copies are paused (`stream: schema.table`): the run didn't wait for them."""
    copies_held: dict[str, str] = field(default_factory=dict)
    """Tables whose copies wait for `tables copy` (`stream: schema.table`), each with the reason."""
    errors: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The error for which each part was given up, by part."""
    slots: dict[str, int | None] = field(default_factory=dict)
    """Bytes of WAL that each slot holds at the source, by slot."""

    @property
    def waits_for_operator(self) -> bool:
        """Whether the lake lacks rows of a table until an operator acts."""
        return bool(self.quarantined or self.paused or self.copies_held)

    @property
    def is_refused(self) -> bool:
        """Whether a part refused the configuration, which only the source could show to be wrong."""
        return any(map(_is_refusal, self.errors.values()))


def _serves_executors(home: Home) -> bool:
    """Return whether executors read the log from this home's Flight server, and no other process serves it."""
    is_wanted = not home.config.spark.is_local and home.config.flight.listen is not None
    return is_wanted and not holder(home.run_folder, "serve")


def _is_refusal(error: Mapping[str, Any]) -> bool:
    """Return whether a part's error says that the configuration is wrong."""
    return error.get("exit_code") == ConfigError.exit_code


def part_command(home: HomePaths, *words: str) -> list[str]:
    """Return the command that starts a part of a home: with this very Python, whatever PATH and the folder contain."""
    return [sys.executable, "-P", "-m", "millstream.cli", "--home", str(home.path), *words]


def run_home(home: Home, *, until_caught_up: bool = False, on_event: Callable[[Event], None]) -> RunOutcome:
    """Run a home's parts: capture, pipeline, in a node the follower, and, without `until_caught_up`, HTTP.

    Args:
        until_caught_up: end when everything that the sources had committed at the call is durable, landed
            and folded.
        on_event: called with all events of parts and their reports.

    Raises:
        HomeBusy: another `run` has the home.
        ConfigError: it configures no stream.
        UsageError (`missing_extra`): pyspark isn't installed.
    """
    home.check_names_stream()
    if importlib.util.find_spec("pyspark") is None:
        raise missing_extra("the pipeline needs pyspark", "spark")
    home.prepare()
    with RoleLock.take(home.run_folder, "run", writer=home.config.writer.name, job=until_caught_up) as lock:
        conductor = _Conductor(home, on_event, until_caught_up=until_caught_up, note=lock.note)
        conductor.supervisor.run()
        return conductor.outcome()


def by_table(streams: Iterable[tuple[str, Mapping[str, Any]]], what: str) -> dict[str, Any]:
    """Return what the outcomes of streams have of tables, by `stream: schema.table`."""
    return {f"{stream}: {table}": its for stream, facts in streams for table, its in facts.get(what, {}).items()}


class _Conductor:
    """Decides the order in which parts end."""

    def __init__(
        self,
        home: Home,
        on_event: Callable[[Event], None],
        *,
        until_caught_up: bool,
        note: Callable[..., None] = lambda **_: None,
    ) -> None:
        self._until_caught_up = until_caught_up
        self._on_event = on_event
        self._note = note
        self._captures = False
        self._landed: dict[str | None, int] = {}
        """The number up to which each stream has landed, as its pipeline reported."""
        option = ["--until-caught-up"] if until_caught_up else []
        # Capture has already retried when it reports an error.
        most, most_of_capture = (_ERRORS_MAX, 1) if until_caught_up else (None, None)
        parts = [
            SupervisedProcess(
                "capture",
                part_command(home, "capture", "run", *option),
                may_end=until_caught_up,
                errors_max=most_of_capture,
            ),
            SupervisedProcess(
                "pipeline",
                part_command(home, "pipeline", "run"),
                errors_max=most,
                final_codes=_LAKE_GONE if until_caught_up else frozenset(),
            ),
        ]
        if not until_caught_up or _serves_executors(home):
            parts.append(
                SupervisedProcess("serve", part_command(home, "serve"), errors_max=1 if until_caught_up else None)
            )
        if not until_caught_up and home.config.replication.node is not None:
            parts.append(SupervisedProcess("follow", part_command(home, "follow")))
        patience_s = home.config.http.ends_within_s + _KILL_S
        self.supervisor: Final = Supervisor(parts, on_event=self._heard, patience_s=patience_s)

    def _heard(self, event: Event) -> None:
        name, what, facts = event
        # A refused configuration ends the run: nothing was captured, and nothing will be until it is corrected.
        is_refused = (name, what) == ("capture", "given_up") and not self._captures and _is_refusal(facts)
        self._on_event((name, what, facts | {"ends_run": True}) if is_refused else event)
        if (name, what) == ("pipeline", "progress"):
            self._note_landing(facts)
        if name == "serve":
            self._note_server(what, facts)
        if (name, what) == ("capture", "progress"):
            self._captures = True
        if what not in {"ended", "given_up"}:
            return
        capture, pipeline = self.supervisor.parts["capture"], self.supervisor.parts["pipeline"]
        if is_refused or (capture.over and pipeline.over):
            self.supervisor.stop()
        elif name == "capture" and self._until_caught_up:
            # The pipeline lands everything durable, whether capture reached its goal or not; not if it
            # never began.
            self.supervisor.tell("pipeline", "stop" if what == "given_up" and not self._captures else "drain")

    def _note_landing(self, facts: Mapping[str, Any]) -> None:
        """Forgive the pipeline its errors if it has landed something."""
        stream, n = facts.get("stream"), (facts.get("progress") or {}).get("n")
        if n is not None and n > self._landed.setdefault(stream, n):
            self._landed[stream] = n
            self.supervisor.forgive("pipeline")

    def _note_server(self, what: str, facts: Mapping[str, Any]) -> None:
        """Record for `status` why the server doesn't listen: its own process, which would report it, has ended."""
        error = facts.get("error") if what == "died" else facts if what == "given_up" else None
        if error:
            texts = {key: str(error.get(key, ""))[:_TEXT_MAX] for key in ("code", "message", "hint")}
            self._note(server_error={**texts, "gave_up": what == "given_up"})
        elif what == "listening":
            self._note(server_error=None)

    def outcome(self) -> RunOutcome:
        """Return the result."""
        parts = self.supervisor.parts
        streams = {
            name: list(parts[name].outcome.get("streams", {}).items()) if name in parts else []
            for name in ("capture", "pipeline")
        }
        of_all = [one for told in streams.values() for one in told]
        quarantined, copies_held, fold_errors = (
            by_table(of_all, what) for what in ("quarantined", "copies_held", "fold_errors")
        )
        errors = {
            name: running.error or {"message": "it could not be started"}
            for name, running in parts.items()
            if running.state is PartState.GIVEN_UP
        }
        caught_up = (
            self._until_caught_up
            and not errors
            and all(bool(told) and all(facts.get("caught_up") for _, facts in told) for told in streams.values())
        )
        slots = {facts["slot"]: facts.get("slot_holds_bytes") for _, facts in streams["capture"] if facts.get("slot")}
        paused = [f"{stream}: {table}" for stream, facts in streams["capture"] for table in facts.get("paused", ())]
        interrupted = self.supervisor.interruptions > 0
        return RunOutcome(caught_up, interrupted, quarantined, fold_errors, paused, copies_held, errors, slots)
