"""The text of the progress line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millstream.cli.progress import JsonReport, PartReport, RunReport, describe
from millstream.processes.run import RunOutcome


def lake(**progress: Any) -> str:
    return describe("pipeline", {"stream": "shop", "progress": progress})


def test_the_line_never_sets_two_counts_of_different_things_side_by_side() -> None:
    """The line was "124,838 records durable → lake: 124,848 landed": the latter count included an earlier run."""
    behind = {"records": 1, "source_end": 9, "durable": 9, "mode": "catching up"}
    assert describe("capture", {"stream": "shop", "progress": behind}).endswith("0 B behind, catching up in chunks")
    captured = describe("capture", {"stream": "shop", "progress": {"records": 124_838, "source_end": 9, "durable": 9}})
    assert captured == "shop: 124,838 records captured, 0 B behind"
    of_run = {"rows": 124_848, "rows_per_s": 0.0, "lag_s": 0.4, "n": 124_848}
    assert lake(**of_run, lag_records=0) == "→ lake: has every record of the log"
    told = lake(**of_run | {"rows_per_s": 4321.0}, lag_records=1_500)
    assert told == "→ lake: at most 1,500 records behind, 4,321/s, lag 0.4 s"
    assert lake() == "→ lake: nothing landed yet"
    assert lake(**of_run | {"n": 0}, lag_records=0) == "→ lake: the log has no record yet"
    aside = lake(**of_run, lag_records=0, quarantined={"public.orders": "it has another shape"})
    assert aside == "→ lake: has every record of the log except those of public.orders"


def test_a_replay_is_told_by_what_it_began_with() -> None:
    """The number of records behind would rise while the pipeline catches up, since new records keep arriving."""
    replay = {"bytes": {"done": 30 << 20, "total": 120 << 20}, "eta_s": 45.0}
    progress = {"rows_per_s": 4321.0, "lag_records": 900_000, "lag_s": 3600.0}
    assert lake(**progress, replay=replay) == "→ lake: replaying, 25 % of 120.0 MiB, 4,321/s, about 45.0 s left"
    just_begun = {"bytes": {"done": 0, "total": 120 << 20}, "eta_s": None}
    assert lake(**progress, replay=just_begun) == "→ lake: replaying, 0 % of 120.0 MiB, 4,321/s"
    assert lake(**progress, replay=None).startswith("→ lake: at most 900,000 records behind")


def test_without_a_terminal_each_table_that_is_copied_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """All of them stood in one line, of unbounded length."""
    copies = {f"public.t{n}": {"state": "reading", "rows": n, "rows_estimate": 10} for n in (1, 2)}
    copies |= {"public.t3": {"state": "paused"}, "public.t4": {"state": "copy_held"}}
    progress = {"records": 5, "source_end": 9, "durable": 9, "copies": copies}
    report = RunReport(terminal=False, until_caught_up=False)
    report.heard(("capture", "progress", {"stream": "shop", "progress": progress}))
    assert capsys.readouterr().err.splitlines() == [
        "shop: 5 records captured, 0 B behind",
        "copying public.t1: 1 of about 10 rows",
        "copying public.t2: 2 of about 10 rows",
        "the copy of public.t3 is paused",
        "the copy of public.t4 is held, until `millstream tables copy` asks for it",
    ]


def test_a_run_that_ends_speaks_of_the_slots_that_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    report = RunReport(terminal=False, until_caught_up=False)
    report.conclude(RunOutcome(caught_up=False, interrupted=True))
    assert "slot" not in capsys.readouterr().err
    report.conclude(RunOutcome(caught_up=False, interrupted=True, slots={"millstream_shop": 2048}))
    assert "for the slot millstream_shop, 2.0 KiB now" in capsys.readouterr().err


def test_a_part_that_caught_up_says_so_last(capsys: pytest.CaptureFixture[str]) -> None:
    """The last line was "0 records captured, 17 KiB behind": of the second at which it began."""
    part = PartReport("capture", silent=False, terminal=False)
    part.heard({"stream": "shop", "progress": {"records": 0, "source_end": 9, "durable": 0}})
    part.heard({"stream": "shop", "progress": {"records": 5, "source_end": 9, "durable": 9}})
    assert part.conclude({"shop": {"caught_up": False}}, must_catch_up=True) == 1
    assert "caught up" not in capsys.readouterr().err
    assert part.conclude({"shop": {"caught_up": True}}, must_catch_up=True) == 0
    assert capsys.readouterr().err.splitlines()[-1].startswith("caught up in ")


def test_a_run_ends_with_the_own_code_and_hint_of_a_fold_that_failed(capsys: pytest.CaptureFixture[str]) -> None:
    """The hint was to run `tables retry`, which refused: only the fold of the table failed."""
    failed = {"shop: public.posts": "a total has more than 64 bits", "shop: public.bad": "it doesn't fit"}
    errors = {"shop: public.posts": {"code": "invalid_value", "hint": "Append an increment of the other sign."}}
    report = RunReport(terminal=False, until_caught_up=True)
    report.conclude(RunOutcome(caught_up=True, interrupted=False, quarantined=failed, fold_errors=errors))
    written = capsys.readouterr().err
    part = PartReport("pipeline", silent=False, terminal=False)
    outcome = {"shop": {"caught_up": True, "quarantined": {"t": "too long"}, "fold_errors": {"t": errors.popitem()[1]}}}
    assert part.conclude(outcome, must_catch_up=True) == 1
    for said in (written, capsys.readouterr().err):
        assert "invalid_value" in said
        assert "Append an increment" in said
    assert "table_quarantined" in written
    assert "tables retry" in written


def test_a_run_says_once_that_its_address_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    report = RunReport(terminal=False, until_caught_up=False)
    error = {"code": "address_in_use", "message": "can't listen on :1", "hint": "Set it."}
    for again in range(3):
        report.heard(("serve", "started", {"pid": again, "restarts": again}))
        report.heard(("serve", "died", {"exit_code": 1, "restart_in_s": 1.0, "error": error}))
    said = capsys.readouterr().err
    assert (said.count("started"), said.count("can't listen on :1"), said.count("Set it.")) == (1, 1, 1)
    report.heard(("serve", "listening", {"url": "http://127.0.0.1:1/"}))
    report.heard(("serve", "died", {"exit_code": 1, "restart_in_s": 1.0, "error": error}))
    assert capsys.readouterr().err.count("can't listen on :1") == 1


def test_a_run_names_the_console_s_address(capsys: pytest.CaptureFixture[str]) -> None:
    report = RunReport(terminal=False, until_caught_up=False)
    report.heard(("serve", "listening", {"address": "127.0.0.1:8787", "url": "http://127.0.0.1:8787/"}))
    line = "serve: the console is at http://127.0.0.1:8787/, next to /metrics, /healthz and /status"
    assert capsys.readouterr().err.splitlines() == [line]


def test_a_run_answers_an_interrupt_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """It printed nothing until a part had drained, up to five seconds later."""
    RunReport(terminal=False, until_caught_up=False).heard(("", "stopping", {}))
    assert capsys.readouterr().err == "stopping; interrupt again to kill the parts\n"
    JsonReport().heard(("", "stopping", {}))
    facts = json.loads(capsys.readouterr().err)
    assert (facts["event"], facts["part"]) == ("stopping", "run")
