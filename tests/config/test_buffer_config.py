"""A stream writes to a buffer or reads from one: any other configuration is an error at its key, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

import millstream
from millstream.config.file import load_config
from millstream.errors import BufferMissing, ConfigError

READS = 'kind = "redis"\nlocation = "redis://:s3cret@localhost/0"\nrole = "reads"\n'


def refused(folder: Path, text: str) -> ConfigError:
    (folder / "millstream.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(folder / "millstream.toml", {})
    return caught.value


@pytest.mark.parametrize("role", ['"both"', '["writes", "reads"]', '"writes, reads"', '"reads writes"'])
def test_both_at_once_are_refused_with_the_reason(tmp_path: Path, role: str) -> None:
    error = refused(tmp_path, f'[streams.shop.buffer]\nlocation = "b"\nrole = {role}\n')
    assert error.details["line"] == 3
    assert "never both: what the stream writes it would take again" in str(error.details["mistakes"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            f'[streams.shop.source]\ndsn = "postgresql://localhost/shop"\n[streams.shop.buffer]\n{READS}',
            "captures a database",
        ),
        (f'[writer]\nname = "a"\n[streams.shop.buffer]\n{READS}', "has one writer"),
        ('[streams.shop.buffer]\nrole = "neither"\nlocation = "b"\n', "must be one of"),
        ('[streams.shop.buffer]\nlocation = "b"\n', "is required"),
        ('[streams.shop.buffer]\nrole = "reads"\n', "is required"),
    ],
)
def test_what_a_stream_with_a_buffer_cannot_have_is_said(tmp_path: Path, text: str, reason: str) -> None:
    assert reason in str(refused(tmp_path, text).details["mistakes"])


def test_passwords_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").write_text(
        f'[streams.shop.buffer]\n{READS}\n[streams.shop.buffer.client]\n"sasl.password" = "s3cret"\n'
    )
    loaded = load_config(tmp_path / "millstream.toml", {})
    assert "s3cret" not in str(list(loaded.items())) + repr(loaded.config)


def test_a_kind_that_nobody_brings_and_a_buffer_that_is_not_there_are_said_when_they_are_asked_for(
    tmp_path: Path,
) -> None:
    for kind, error in (("pigeons", ConfigError), ("log", BufferMissing)):
        (tmp_path / "millstream.toml").write_text(
            f'[streams.shop.buffer]\nkind = "{kind}"\nlocation = "b"\nrole = "writes"\n'
        )
        with millstream.open(tmp_path) as home, pytest.raises(error):
            home.append("shop", "clicks", {"id": 1})
