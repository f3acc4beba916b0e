"""Options of Debezium's formats, by Debezium's names with `_` for `.`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from millstream.errors import ConfigError

_CHOICES: Final = {
    "format": ("debezium", "debezium-flat", "json"),
    "decimal_handling_mode": ("precise", "double", "string"),
    "time_precision_mode": (
        "adaptive",
        "adaptive_time_microseconds",
        "connect",
        "isostring",
        "microseconds",
        "nanoseconds",
    ),
    "binary_handling_mode": ("bytes", "base64", "base64-url-safe", "hex"),
    "interval_handling_mode": ("numeric", "string"),
}
_SKIPPABLE: Final = ("c", "u", "d", "t", "x", "none")


@dataclass(frozen=True, slots=True)
class DebeziumOptions:
    """How records become Kafka messages; the values are Debezium's.

    Raises `ConfigError` if a value isn't one of Debezium's.
    """

    format: str = "debezium"
    decimal_handling_mode: str = "precise"
    time_precision_mode: str = "adaptive"
    binary_handling_mode: str = "bytes"
    interval_handling_mode: str = "numeric"
    schemas_enable: bool = True
    """Whether keys and values carry their schema, as Kafka Connect's JSON converter writes them."""
    tombstones_on_delete: bool = True
    """Whether a message without a value follows each delete."""
    skipped_operations: str = "none"
    """Operations that are left out: a list of `c`, `u`, `d`, `t` and `x` with commas, or `none`."""
    include_unknown_datatypes: bool = False
    """Whether columns of types that Debezium doesn't support are sent, as bytes of PostgreSQL's text."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise _refused(name, getattr(self, name), choices)
        for name in ("schemas_enable", "tombstones_on_delete", "include_unknown_datatypes"):
            if not isinstance(getattr(self, name), bool):
                raise _refused(name, getattr(self, name), ("true", "false"))
        self.skipped()

    def skipped(self) -> frozenset[str]:
        """Return the letters of the operations that are left out."""
        letters = [letter.strip() for letter in str(self.skipped_operations).split(",")]
        if any(letter not in _SKIPPABLE for letter in letters) or ("none" in letters and len(letters) > 1):
            raise _refused("skipped_operations", self.skipped_operations, _SKIPPABLE)
        return frozenset(letters) - {"none"}


def _refused(name: str, value: object, choices: tuple[str, ...]) -> ConfigError:
    return ConfigError(
        f"{name} can't be {value!r}: it is none of {', '.join(choices)}",
        hint=f"Set {name} to one of {', '.join(choices)}.",
        key=name,
    )
