"""The fields of requests to consumers; anything else in a body is `invalid_value`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from millstream.delivery.definition import START_HINT
from millstream.errors import InvalidValue

BATCH_SIZE: Final = 100
BATCH_SIZE_MAX: Final = 1000
WAIT_MS_MAX: Final = 30_000
ACK_IDS_MAX: Final = 10_000
_ACK_WAIT_MS: Final = (100, 43_200_000)
_DELAY_MS_MAX: Final = 86_400_000
_PAGE: Final = 100
_PAGE_MAX: Final = 1000
ALL: Final = "all"


def waiting(body: Any) -> tuple[int, float]:
    """Return a `receive`'s number of messages, and how long it waits in seconds."""
    fields = _fields(body, "batch_size", "wait_for_ms")
    return _number(fields, "batch_size", BATCH_SIZE, 1, BATCH_SIZE_MAX), _number(
        fields, "wait_for_ms", 0, 0, WAIT_MS_MAX
    ) / 1000


class Settling(NamedTuple):
    """An `ack`, a `nack` or an `extend`."""

    ids: list[str]
    ms: int | None = None
    """The delay or the wait; None for the default."""
    has_failed: bool = True
    """Whether a `nack` counts for `max_deliver`."""


def settling(how: str, body: Any) -> Settling:
    """Return the fields of an `ack`, a `nack` or an `extend`."""
    other = {"ack": (), "nack": ("delay_ms", "failed"), "extend": ("ack_wait_ms",)}[how]
    fields = _fields(body, "ack_ids", *other)
    ids = _texts(fields, "ack_ids")
    if len(ids) > ACK_IDS_MAX:
        raise InvalidValue(
            f"ack_ids has {len(ids)} ids, and may have {ACK_IDS_MAX}", hint="Send them in several requests."
        )
    if how == "nack":
        delay_ms, has_failed = _number(fields, "delay_ms", 0, 0, _DELAY_MS_MAX), fields.get("failed", True)
        if not isinstance(has_failed, bool) or (delay_ms and not has_failed):
            raise InvalidValue(
                "failed must be true or false, and true if there is a delay",
                hint="Leave failed out for messages that the consumer couldn't handle.",
            )
        return Settling(ids, delay_ms, has_failed)
    if how == "extend" and fields.get("ack_wait_ms") is not None:
        return Settling(ids, _number(fields, "ack_wait_ms", "the consumer's", *_ACK_WAIT_MS))
    return Settling(ids)


def wanted_place(body: Any) -> str:
    """Return the target of a rewind."""
    text = _fields(body, "to").get("to")
    if not isinstance(text, str) or not text.strip():
        raise InvalidValue("to isn't a text", hint=START_HINT)
    return text


class AskedRows(NamedTuple):
    """The rows that a backfill delivers."""

    tables: list[str] | None = None
    """Patterns; None for all tables of the consumer."""
    where: str | None = None


ALL_ROWS: Final = AskedRows()


def wanted_rows(body: Any) -> AskedRows:
    """Return the fields of a backfill."""
    fields = _fields(body, "tables", "where")
    tables, where = fields.get("tables"), fields.get("where")
    if tables is not None and (
        not isinstance(tables, list) or not tables or not all(isinstance(text, str) for text in tables)
    ):
        raise InvalidValue("tables isn't a list of texts", hint="Leave it out for all tables of the consumer.")
    if where is not None and not isinstance(where, str):
        raise InvalidValue("where isn't a text", hint="Send a condition, such as `total > 10`, or leave it out.")
    return AskedRows(tables, where)


def check_empty(body: Any) -> None:
    """Refuse a body with fields, for a request that has none."""
    if body is not None and body != {}:
        raise InvalidValue("the request has no fields", hint="Send an empty body, or {}.")


def page(body: Any) -> tuple[tuple[int, str] | None, int]:
    """Return behind which dead letter a page begins, and how many it has at most."""
    fields = _fields(body, "after", "limit")
    limit = _number(fields, "limit", _PAGE, 1, _PAGE_MAX)
    after = fields.get("after")
    if after is None:
        return None, limit
    died, _, id_ = str(after).partition(".")
    if not died.isascii() or not died.isdigit() or not id_:
        raise InvalidValue(
            f"after={str(after)[:80]!r} isn't the `next` of an answer", hint="Leave it out to begin with the oldest."
        )
    return (int(died), id_), limit


def dead_letter_ids(body: Any) -> list[str] | None:
    """Return the ids of dead letters; None for all."""
    fields = _fields(body, "ids")
    return None if fields.get("ids") == ALL else _texts(fields, "ids")


def _fields(body: Any, *known: str) -> Mapping[str, Any]:
    if body is None:
        return {}
    if not isinstance(body, Mapping):
        raise InvalidValue("the body isn't an object", hint=f"Send an object of: {', '.join(known)}.")
    unknown = [str(field) for field in body if field not in known]
    if unknown:
        raise InvalidValue(f"there is no field {unknown[0][:80]!r}", hint=f"Use: {', '.join(known)}.")
    return body


def _number(fields: Mapping[str, Any], field: str, default: int | str, least: int, most: int) -> int:
    value = fields.get(field, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidValue(
            f"{field} isn't a whole number from {least} to {most}",
            hint=f"Send such a number, or leave the field out: the default is {default}.",
        )
    return value


def _texts(fields: Mapping[str, Any], field: str) -> list[str]:
    value = fields.get(field)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise InvalidValue(f"{field} isn't a list of texts", hint=f'Send {{"{field}": ["…"]}}, with ids of an answer.')
    return value
