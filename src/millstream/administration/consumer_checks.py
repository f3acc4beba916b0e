"""`doctor`'s check of a stream's consumers: their state is there, and can be read. If it is lost, they can be forgotten."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from millstream.administration.lake_checks import has_todays_catalog, id_in
from millstream.errors import MillstreamError
from millstream.model.human_text import counted

if TYPE_CHECKING:
    from millstream.config.model import StreamConfig
    from millstream.delivery.state_repair import Damage
    from millstream.errors import DeliveryError
    from millstream.home.home import Home


def has_consumers(home: Home, name: str, stream: StreamConfig) -> bool:
    """Return whether a stream has consumers, is to have some, or had some whose state is gone."""
    is_configured = bool(stream.consumers or home.loaded_config.unset_consumers(name))
    return is_configured or home.delivery_folder(name).exists() or _find_missing(home, name) is not None


def check_consumer_state(home: Home, name: str) -> str:
    """Return how many consumers have a state that can be read.

    Raises:
        DeliveryError (`consumer_state_missing`): the log is held for consumers whose state was moved or removed.
        DeliveryError (`consumer_state_unreadable`), ConfigError …: as `check_consumers` and `check_unmade`.
    """
    from millstream.delivery.state_repair import stored_names
    from millstream.writers.home_consumers import check_consumers, check_unmade

    missing = _find_missing(home, name)
    if missing is not None:
        raise missing
    check_consumers(home, name)
    check_unmade(home, name)
    return f"the state of {counted(len(stored_names(home.delivery_folder(name))), 'consumer')} can be read"


def lost_state(home: Home, name: str, *, forget: bool) -> Damage | None:
    """Return what is lost with a state that was moved or removed; None if it is there.

    Args:
        home: the home.
        name: the stream.
        forget: whether the log is held for these consumers no longer. The stream has no consumers then.

    Raises:
        MillstreamError: the catalog can't be read or written.
    """
    from millstream.delivery.state_repair import Damage
    from millstream.writers.home_consumers import ConsumerHolders, find_missing_state

    if not home.has_catalog():
        return None
    with home.open_catalog() as catalog:
        stream = id_in(catalog, name)
        if stream is None:
            return None
        missing = find_missing_state(home, name, [position.name for position in catalog.pipelines(stream)])
        if missing is None:
            return None
        holders = ConsumerHolders(catalog, stream)
        lost = tuple(sorted(holders.names()))
        if forget:
            holders.replace({})
        return Damage(str(missing.details["file"]), 0, 0, 0, (), lost)


def _find_missing(home: Home, name: str) -> DeliveryError | None:
    from millstream.writers.home_consumers import find_missing_state

    with contextlib.suppress(MillstreamError):  # the check of the catalog reports it
        if has_todays_catalog(home):
            with home.open_catalog() as catalog:
                stream = id_in(catalog, name)
                holders = [] if stream is None else [position.name for position in catalog.pipelines(stream)]
                return find_missing_state(home, name, holders)
    return None
