"""Messages of the log's records: what a consumer receives of each, and what the service keeps of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from millstream.delivery.definition import Definition
from millstream.delivery.records.latest import OLD, KeyState, Newest, completed, states_of
from millstream.delivery.sinks import LoggedRow
from millstream.model.column_renames import names_in
from millstream.model.records import Op
from millstream.model.schema import TableSchema
from millstream.protocol.delivery.messages import Message
from millstream.wal.records_json import Line

_LEFT: Final = Op.PARTITION_LEFT.letter
BARRIERS: Final = frozenset({Op.TRUNCATE.letter, _LEFT})
"""Operations that wait for all earlier messages of their table and hold all later ones."""


class Origin(NamedTuple):
    """The facts that the service keeps of a message until it is settled."""

    group: str | None
    record: str | None
    """The record as JSON; None if it is made of `logged` when it is shown: see `record_of`."""
    committed_us: int | None = None
    """When its operation was committed, in microseconds since 1970-01-01 UTC; None if that isn't known."""
    update: str | None = None
    """With kind `latest`: the update that a `d` stands for."""
    is_partial: bool = False
    """With kind `latest`: whether the record, or that update, left columns unchanged."""
    logged: LoggedRow | None = None
    """The record in the log's form, if the consumer's sink needs the types of its columns."""
    schema: TableSchema | None = None
    """With kind `latest`: the table's schema when the record was made."""


def size_of(record: str) -> int:
    """Return the size in bytes of a record as JSON."""
    return len(record) if record.isascii() else len(record.encode())


def record_of(origin: Origin) -> str:
    """Return a message's record as JSON."""
    logged = origin.logged
    if origin.record is not None or logged is None or logged.texts is None:
        assert origin.record is not None, "a message has its record in one of its forms"
        return origin.record
    return logged.texts(logged.batch.slice(logged.row, 1))[0]


class KnownRow(NamedTuple):
    """A row of a key: an update, or another record of it."""

    record: str
    """As JSON."""
    schema: TableSchema | None
    """The table's schema then, if it is known."""


def row_of(line: Line, groups: tuple[str, ...], group: str, definition: Definition) -> KnownRow | None:
    """Return the row that a key has after a record, as an update, whether it matches or not; None if it has none."""
    for state in states_of(line.facts, line.schema.key, groups, is_gone=True):
        if state.group == group and state.update is not None:
            return KnownRow(_json(state.update, definition, line.schema), line.schema)
    return None


def merged(known: KnownRow, newer: Message, origin: Origin, chosen_names: Mapping[str, str] | None = None) -> Message:
    """Return a message that leaves columns unchanged and replaces an undelivered one of its key.

    Args:
        known: the record, or the update, of the message that is replaced.
        newer: the message that replaces it.
        origin: that message's facts.
        chosen_names: the consumer's names of the columns that it chooses; None: all, under their own names.
    """
    moved: Collection[str] = ()
    if known.schema is not None and origin.schema is not None and known.schema is not origin.schema:
        moved = names_in(known.schema, origin.schema)
    if chosen_names is not None:
        moved = [chosen_names[name] for name in moved if name in chosen_names]
    whole = completed(known.record, Newest(record_of(origin), origin.update, origin.is_partial), moved)
    told = Origin(origin.group, whole.record, origin.committed_us, *whole[1:], schema=origin.schema)
    return newer._replace(size=size_of(whole.record), origin=told)


def chosen(facts: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Return a record with the chosen columns alone, under their new names; an `x`, which has none, as it is."""
    found = dict(facts)
    if facts["op"] == _LEFT:
        return found
    for field in ("row", "before", "exact"):
        values = facts[field]
        if values is not None:
            found[field] = {new: values[name] for name, new in renamed.items() if name in values}
    found["unchanged"] = [new for name, new in renamed.items() if name in facts["unchanged"]]
    return found


def newest_messages(
    line: Line, id_: str, groups: tuple[str, ...], moment: int | None, definition: Definition, *, is_gone: bool
) -> tuple[Message, Message | None]:
    """Return a record's message of kind `latest`; two for a change of a key."""
    table = int(line.schema.table_id)
    if line.facts["op"] in BARRIERS:
        record = _json(line.facts, definition, line.schema)
        leaf = line.facts["partition_oid"] if line.facts["op"] == _LEFT else None
        told = Message(
            0, 0, id_, (), table, True, size_of(record), Origin(None, record, moment), truncates=True, leaf=leaf
        )
        return told, None
    states = states_of(line.facts, line.schema.key, groups, is_gone=is_gone)
    first, *rest = (_state_message(state, id_, line.schema, moment, definition) for state in states)
    return first, rest[0] if rest else None


def _state_message(
    state: KeyState, id_: str, schema: TableSchema, moment: int | None, definition: Definition
) -> Message:
    record = _json(state.facts, definition, schema)
    update = None if state.update is None else _json(state.update, definition, schema)
    is_partial = bool((state.update or state.facts)["unchanged"])
    origin = Origin(state.group, record, moment, update, is_partial, schema=schema)
    own_id = f"{id_}{OLD}" if state.is_old else id_
    table, leaf = int(schema.table_id), state.facts.get("partition_oid")
    return Message(0, 0, own_id, (state.group,), table, barrier=False, size=size_of(record), origin=origin, leaf=leaf)


def _json(facts: Mapping[str, Any], definition: Definition, schema: TableSchema) -> str:
    """Return a table's record as JSON, with the columns that the definition chooses."""
    names = definition.names_of(schema.key)
    return msgspec.json.encode(facts if names is None else chosen(facts, names)).decode()
