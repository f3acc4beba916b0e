"""The checks of what callers send: whole numbers, signals and hides. Each error names the field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from millstream_forage.errors import InvalidField
from millstream_forage.tables import DWELL_FULL_MS, ID_MAX, KINDS, TARGET_OF, TARGETS, WEIGHTS, Target

KEY_MAX: Final = 256
NAME_MAX: Final = 1_000
"""Characters of the name of a source or creator."""


@dataclass(frozen=True, slots=True)
class Reaction:
    """A checked signal."""

    user_id: int
    item_id: int
    kind: str
    duration_ms: int | None
    impression_id: int | None
    idempotency_key: str | None

    @property
    def weight(self) -> float:
        """The reward of this signal."""
        if self.duration_ms is not None:
            return min(1.0, self.duration_ms / DWELL_FULL_MS)
        return WEIGHTS[self.kind]

    def record(self, signal_id: int, now_ns: int) -> dict[str, Any]:
        """Return the row of `signals`."""
        return {
            "id": signal_id,
            "user": self.user_id,
            "item": self.item_id,
            "kind": self.kind,
            "weight": self.weight,
            "duration_ms": self.duration_ms,
            "impression": self.impression_id,
            "idempotency_key": self.idempotency_key,
            "now": now_ns,
        }


@dataclass(frozen=True, slots=True)
class HideChange:
    """A checked change of what a user hides."""

    user_id: int
    target: Target
    value: str
    kind: str

    @property
    def hidden(self) -> bool:
        """Whether the target is hidden after it."""
        return self.kind != "unhide"

    def record(self) -> dict[str, Any]:
        """Return the row of `hides`."""
        return {
            "user": self.user_id,
            "target": self.target,
            "value": self.value,
            "hidden": self.hidden,
            "kind": self.kind,
        }


def whole_number(field: str, value: object, *, least: int = 0, most: int = ID_MAX) -> int:
    """Return a whole number within bounds; `InvalidField` for anything else, booleans included."""
    if type(value) is not int:
        raise InvalidField(field, "must be a whole number")
    if not least <= value <= most:
        raise InvalidField(field, f"must be from {least} to {most}")
    return value


def text(field: str, value: object, most: int) -> str:
    """Return a text that isn't empty and that every reader can decode."""
    if not isinstance(value, str):
        raise InvalidField(field, "must be a text")
    if not value or len(value) > most:
        raise InvalidField(field, f"must have 1 to {most} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidField(field, "holds half of a character") from None
    if "\x00" in value:
        raise InvalidField(field, "holds a null character")
    return value


def reaction(
    *,
    user_id: object,
    item_id: object,
    signal_type: object,
    duration_ms: object = None,
    impression_id: object = None,
    idempotency_key: object = None,
) -> Reaction:
    """Return a signal whose fields fit; `InvalidField` otherwise."""
    whole_number("user_id", user_id)
    whole_number("item_id", item_id)
    if signal_type not in KINDS:
        raise InvalidField("signal_type", f"must be one of {', '.join(KINDS)}")
    if signal_type == "dwell":
        if duration_ms is None:
            raise InvalidField("duration_ms", "is missing: a dwell has a duration")
        whole_number("duration_ms", duration_ms)
    elif duration_ms is not None:
        raise InvalidField("duration_ms", "belongs to a dwell alone")
    return Reaction(
        user_id=whole_number("user_id", user_id),
        item_id=whole_number("item_id", item_id),
        kind=str(signal_type),
        duration_ms=None if duration_ms is None else whole_number("duration_ms", duration_ms),
        impression_id=None if impression_id is None else whole_number("impression_id", impression_id),
        idempotency_key=None if idempotency_key is None else text("idempotency_key", idempotency_key, KEY_MAX),
    )


def hide_change(*, user_id: object, target: object, kind: object) -> HideChange:
    """Return a change of what a user hides; `InvalidField` if its fields don't fit."""
    user = whole_number("user_id", user_id)
    kinds = [*TARGET_OF, "unhide"]
    if kind not in kinds:  # a list, for a kind may be any value of JSON, and not all of them have a hash
        raise InvalidField("kind", f"must be one of {', '.join(kinds)}")
    if not isinstance(target, Mapping) or len(target) != 1:
        raise InvalidField("target", f"must name exactly one of {', '.join(TARGETS)}")
    ((name, value),) = target.items()
    if name not in TARGETS:
        raise InvalidField("target", f"must name one of {', '.join(TARGETS)}")
    wanted = TARGET_OF.get(str(kind), name)
    if name != wanted:
        raise InvalidField("target", f"must be the {wanted} for kind {kind}")
    found = str(whole_number("target", value)) if name == "item" else text("target", value, NAME_MAX)
    return HideChange(user, name, found, str(kind))
