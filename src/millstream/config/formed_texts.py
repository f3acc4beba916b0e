"""Texts of a certain form, such as names and addresses: each type rejects others in words."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator

from millstream.model.durations import duration_s

_ADDRESS: Final = re.compile(r"(?:\[[0-9a-fA-F:.]+\]|[^:\s\[\]]*):([0-9]{1,5})")
_PORT_MAX: Final = 65535


def _formed(pattern: str, words: str) -> AfterValidator:
    """Return the check of a text's whole; `words` complete the sentence "must be …"."""
    form = re.compile(pattern)

    def check(text: str) -> str:
        if form.fullmatch(text) is None:
            raise ValueError(f"must be {words}")
        return text

    return AfterValidator(check)


def _check_listen(text: str) -> str:
    """Return the text itself, if it is a host and a port."""
    form = _ADDRESS.fullmatch(text)
    if form is None or int(form[1]) > _PORT_MAX:
        raise ValueError(f"must be a host and a port up to {_PORT_MAX}, such as 127.0.0.1:8787 or [::1]:8787")
    return text


def _check_interval(text: str) -> str:
    if not duration_s(text):
        raise ValueError(f"{text!r} must be longer than nothing")
    return text


PublicationName = Annotated[str, _formed(r".+", "text that isn't empty, on one line")]
"""A publication's name, without quotes."""
SlotName = Annotated[str, _formed(r"[a-z0-9_]{1,63}", "1 to 63 of: lower-case letters, digits and _")]
"""A name that PostgreSQL takes for a replication slot."""
SchemaPrefix = Annotated[str, _formed(r"[a-z0-9_]*", "lower-case letters, digits and _ only")]
"""The beginning of a schema's name that needs no quotes."""
KindName = Annotated[
    str, _formed(r"[a-z][a-z0-9_]{0,62}", "a lower-case letter, then up to 62 lower-case letters, digits and _")
]
"""The name of an entry point."""
TopicName = Annotated[str, _formed(r"[A-Za-z0-9._-]{1,200}", "1 to 200 of: letters, digits, '.', '_' and '-'")]
"""A name that Kafka takes for a topic."""
WriterName = Annotated[str, _formed(r"[A-Za-z0-9_-]{1,63}", "1 to 63 of: letters, digits, _ and -")]
"""A writer's name."""
SparkMaster = Annotated[
    str,
    _formed(
        r"local(\[(\*|[1-9]\d*)( *, *\d+)?\])?|local-cluster\[\d+ *, *\d+ *, *\d+\]|yarn|k8s://.+"
        r"|spark://[^\s,/]+:\d+(,[^\s,/]+:\d+)*",
        "local[*] or local[N], spark://host:port, yarn, or k8s://https://host:port",
    ),
]
"""The address of a Spark master."""
Interval = Annotated[str, AfterValidator(_check_interval)]
"""A duration longer than nothing: `10s`."""
Listen = Annotated[str, AfterValidator(_check_listen)]
"""`127.0.0.1:8787`, `[::1]:8787`; `:8787` for all addresses of the machine."""
HostName = Annotated[
    str,
    _formed(
        r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?|\[?[0-9A-Fa-f:.]+\]?",
        "a host name or an IP address, without scheme and port",
    ),
]
"""A name or an address, without scheme and port."""


def _refuse_parquet(value: object) -> object:
    if value == "parquet":
        raise ValueError(
            "must be one of 'delta', 'iceberg' or 'postgres', not 'parquet': files alone can't be committed together. The data "
            "files of 'delta' and 'iceberg' are Parquet, and docs/how-to/read-the-tables.md exports them as such"
        )
    return value


LakeFormat = Annotated[Literal["delta", "iceberg", "postgres"], BeforeValidator(_refuse_parquet)]
"""The format of a lake's tables, with the way out for one that isn't built."""
