"""Values from before a rule, which are still on disk: `run` warns of them, `status` and `doctor` show until when."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.app.landed import LandedHome

from millstream.administration.doctor import _alerts
from millstream.app.status import collect_status
from millstream.home.home import Home
from millstream.testing.postgres import EmbeddedPostgres

RULE = '\n[streams.shop.tables."public.users"]\nexclude = ["ssn"]\n'


def warned(landed: LandedHome) -> bool:
    """Capture; return whether a warning named the values."""
    with capture_logs() as lines:
        landed.capture()
    return any(line.get("code") == "raw_values_kept" for line in lines)


@pytest.mark.long
def test_values_from_before_a_rule_are_named_until_they_are_gone(tmp_path: Path) -> None:
    with EmbeddedPostgres(18, fsync=False) as server:
        with server.connect() as connection:
            connection.execute("CREATE TABLE users (id int PRIMARY KEY, ssn text)")
            connection.execute("INSERT INTO users VALUES (1, 'secret')")
        landed = LandedHome(tmp_path / "home", server.dsn())
        assert not warned(landed)
        assert [t["raw_values"] for t in collect_status(landed.home)["streams"][0]["tables"]] == [None]
        file = landed.home.config_file
        file.write_text(file.read_text() + RULE)
        landed.home = Home(tmp_path / "home")
        assert warned(landed)
        (table,) = collect_status(landed.home)["streams"][0]["tables"]
        raw = table["raw_values"]
        assert (raw["columns"], raw["log"], raw["history"], raw["history_until"]) == (["ssn"], True, True, None)
        assert raw["since"] < raw["log_until"]
        (found,) = (d for d in _alerts(landed.home) if d.code == "raw_values_kept")
        assert (found.table, found.blocks) == ("public.users", "nothing")
        assert warned(landed)
