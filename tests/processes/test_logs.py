from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from millstream.processes.logs import Words

REFUSED = {"event": "the stream begins again", "part": "capture", "stream": "s", "level": "warning", "timestamp": "now"}


def test_a_trouble_that_goes_on_is_one_short_line() -> None:
    words = Words(terminal=False, for_home=lambda hint: hint.replace("`millstream", "`millstream --home h"))
    trouble = REFUSED | {"code": "source_unreachable", "error": "refused\nreally?", "hint": "Run `millstream doctor`."}
    first, second = (words(None, "", trouble | {"in_s": wait_s}) for wait_s in (0.5, 1.0))
    assert first.splitlines() == [
        "capture, stream s: source_unreachable: refused; really?; next try in 0.5 s",
        "  hint: Run `millstream --home h doctor`.",
    ]
    assert second == "capture, stream s: still unreachable; next try in 1.0 s"


def test_facts_stand_behind_what_happened() -> None:
    line = Words(terminal=False)(None, "", {"event": "table copied", "part": "capture", "table": "a.b", "rows": 7})
    assert line == "capture: table copied (table a.b, rows 7)"


@pytest.mark.parametrize(
    ("code", "said"),
    [({}, "warning: older values"), ({"code": "raw_values_kept"}, "warning: raw_values_kept: older values")],
)
def test_a_warning_says_its_code(code: dict[str, str], said: str) -> None:
    event = {"event": "older values are kept", "part": "capture", "level": "warning", "table": "a.b"}
    assert Words(terminal=False)(None, "", event | code) == f"capture: {said} are kept (table a.b)"


def test_the_hint_of_a_warning_stands_on_a_line_of_its_own() -> None:
    event = {"event": "a slot is left", "part": "capture", "level": "warning", "hint": "Run `this`."}
    assert Words(terminal=False)(None, "", event) == "capture: warning: a slot is left\n  hint: Run `this`."


def test_lines_that_find_no_room_end_nobody() -> None:
    """A process whose log lines go to a full disk crashed at its first message about that."""
    talk = "import structlog; from millstream.processes.logs import configure_logs; configure_logs(part='x'); structlog.get_logger().warning('no room'); print('on')"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", talk], stdout=subprocess.PIPE, stderr=full, check=False)
    assert done.stdout == b"on\n"
