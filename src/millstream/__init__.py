"""Millstream: an ordered, durable change log for PostgreSQL, with its data pipeline on Spark.

Everything public is importable from here, from `millstream.aio`, from `millstream.errors` or from `millstream.testing`; the rest may change.
Names are looked up when they are first used (PEP 562), so that `import millstream` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream import errors as errors
    from millstream.app.calls import Latest as Latest
    from millstream.app.calls import Session as Session
    from millstream.app.opened import OpenHome as OpenHome
    from millstream.app.opened import open as open  # noqa: A004 - `millstream.open` is the name of the thing
    from millstream.app.remote.client import RemoteHome as RemoteHome
    from millstream.app.remote.client import connect as connect
    from millstream.errors import MillstreamError as MillstreamError
    from millstream.model.operations import Appended as Appended
    from millstream.model.positions import StreamToken as StreamToken

__version__ = "0.1.0"

_PUBLIC = {
    "Appended": ("millstream.model.operations", "Appended"),
    "Latest": ("millstream.app.calls", "Latest"),
    "MillstreamError": ("millstream.errors", "MillstreamError"),
    "OpenHome": ("millstream.app.opened", "OpenHome"),
    "RemoteHome": ("millstream.app.remote.client", "RemoteHome"),
    "Session": ("millstream.app.calls", "Session"),
    "StreamToken": ("millstream.model.positions", "StreamToken"),
    "connect": ("millstream.app.remote.client", "connect"),
    "errors": ("millstream.errors", None),
    "open": ("millstream.app.opened", "open"),
}


def __getattr__(name: str) -> object:
    try:
        module, attribute = _PUBLIC[name]
    except KeyError:
        raise AttributeError(f"module 'millstream' has no attribute {name!r}") from None
    found = importlib.import_module(module)
    value = found if attribute is None else getattr(found, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
