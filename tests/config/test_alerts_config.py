"""`[alerts]`: mistakes have their line and key, and secrets aren't shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.config.file import load_config
from millstream.errors import ConfigError

STREAM = "[streams.web]\n"


def load(folder: Path, text: str) -> object:
    (folder / "millstream.toml").write_text(STREAM + text)
    return load_config(folder / "millstream.toml", {"TOKEN": "whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"})


@pytest.mark.parametrize(
    ("text", "key", "what"),
    [
        ('url = "ftp://x"', "alerts.url", "is neither an http nor an https URL"),
        ('url = "http://user:pw@x/"', "alerts.url", "has a user or a password in it"),
        ('url = "http://x/"\nsecret = "plain"', "alerts.secret", "isn't whsec_ with base64 behind it"),
        ('url = "http://x/"\nheaders = { host = "y" }', "alerts.headers", "can't have 'host'"),
        ('url = "http://x/"\nsecret = 7', "alerts.secret", "must be a secret, or a list of them"),
        ('secret = "${TOKEN}"', "alerts.url", "is required with a secret or headers"),
        ('slot_lag = "20%"', "alerts.slot_lag", "can't be a share here"),
        ('look_every = "0s"', "alerts.look_every", "must be longer than nothing"),
        ('stalled = "1m"', "alerts.stalled", "did you mean stalled_after"),
    ],
)
def test_a_mistake_is_told_at_its_key(tmp_path: Path, text: str, key: str, what: str) -> None:
    with pytest.raises(ConfigError, match=key) as raised:
        load(tmp_path, f"[alerts]\n{text}\n")
    assert what in raised.value.message
    assert "plain" not in raised.value.message
    assert raised.value.details["line"] > 1


def test_a_private_address_is_allowed_and_no_secret_is_shown(tmp_path: Path) -> None:
    text = (
        '[alerts]\nurl = "http://127.0.0.1:8080/hooks/T0KEN?key=T0KEN"\nsecret = ["${TOKEN}"]\n'
        'headers = { authorization = "Bearer T0KEN", x-team = "T0KEN" }\n'
    )
    shown = {path: value for path, value, _ in load(tmp_path, text).items() if path[0] == "alerts"}  # type: ignore[attr-defined]
    assert shown["alerts", "url"] == "http://127.0.0.1:8080/***"
    assert "T0KEN" not in str(shown)
    assert "whsec" not in str(shown)
