"""Examination and repair of a stream's consumers' state: what is damaged, and what is lost by going on without it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millstream.delivery.consumer_store import LOG_NAME, read_consumers, valid_consumers
from millstream.delivery.consumers_log_format import HEAD_BYTES, MAGIC, entries_behind, mark, parse
from millstream.errors import DeliveryError
from millstream.private_files import replace_file
from millstream.wal.files import error_of_os


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged place of the state's log, or an entry that is whole and can't follow the earlier ones."""

    file: str
    byte: int
    lost_bytes: int
    """Size in bytes of what a repair cuts off."""
    lost_changes: int
    """Number of whole entries behind the damage, which a repair drops."""
    kept: tuple[str, ...]
    """The consumers that a repair keeps, as they were before the damage."""
    touched: tuple[str, ...]
    """The consumers that were created, changed or removed behind the damage, as far as that can be read."""


def stored_names(folder: Path) -> set[str]:
    """Return the consumers in a state that may be in use. Raises as `Store.open`; changes nothing."""
    path = folder / LOG_NAME
    try:
        return set(read_consumers(path, path.read_bytes())[1])
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise error_of_os(error) from error


def damage_of(folder: Path) -> Damage | None:
    """Return the damage of a state that isn't in use; None if there is none.

    Raises:
        DeliveryError (`consumer_state_unreadable`): it is no state.
        MillstreamError (`io_failed` …): the disk fails.
    """
    path = folder / LOG_NAME
    data = _read(path)
    try:
        contents = parse(data)
    except ValueError as error:
        raise _hopeless(path, str(error)) from error
    consumers, count, invalid = valid_consumers(contents.entries)
    if invalid is None and not contents.is_damaged:
        return None
    end = contents.ends[count - 1] if count else HEAD_BYTES
    behind = entries_behind(data, end)
    return Damage(
        str(path),
        end,
        contents.size - end,
        len(behind),
        tuple(sorted(consumers)),
        tuple(sorted({str(entry[1]) for entry in behind})),
    )


def repair(folder: Path) -> tuple[Damage | None, str | None]:
    """Cut a state off at its damage; return the damage, and the file that has the bytes that were cut. Raises as `damage_of`."""
    damage = damage_of(folder)
    if damage is None:
        return None, None
    path = folder / LOG_NAME
    aside = folder / f"{LOG_NAME}.{damage.byte}.torn"
    data = _read(path)
    try:
        replace_file(aside, data[damage.byte :])
        replace_file(path, MAGIC + mark(damage.byte) + data[HEAD_BYTES : damage.byte])
    except OSError as error:
        raise error_of_os(error) from error
    return damage, str(aside)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise _hopeless(path, "there is none") from None
    except OSError as error:
        raise error_of_os(error) from error


def _hopeless(path: Path, why: str) -> DeliveryError:
    return DeliveryError(
        f"the consumers' state in {path} can't be repaired: {why}",
        code="consumer_state_unreadable",
        hint="Restore the file from a backup, promote a follower, or move the file away and create the consumers again.",
        file=str(path),
    )
