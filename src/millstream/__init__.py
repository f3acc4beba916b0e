"""Millstream: an ordered, durable change log for PostgreSQL, with its data pipeline on Spark.

Everything public is importable from here, from `millstream.aio`, `millstream.crdt`, `millstream.errors` or `millstream.testing`;
the rest may change.
Names are looked up when they are first used (PEP 562), so that `import millstream` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream import errors as errors
    from millstream.app.open_home import OpenHome as OpenHome
    from millstream.app.open_home import open as open  # noqa: A004 - `millstream.open` is the name of the thing
    from millstream.client.call_results import Latest as Latest
    from millstream.client.following import Following as Following
    from millstream.client.remote_home import RemoteHome as RemoteHome
    from millstream.client.remote_home import connect as connect
    from millstream.client.write_session import Session as Session
    from millstream.codec.buffer_reading import PlacedReader as PlacedReader
    from millstream.codec.buffered_op import decode_op as decode_op
    from millstream.codec.buffered_op import encode_op as encode_op
    from millstream.errors import MillstreamError as MillstreamError
    from millstream.model.buffered_operations import BufferedOp as BufferedOp
    from millstream.model.buffered_operations import BufferMeta as BufferMeta
    from millstream.model.buffered_operations import BufferOffset as BufferOffset
    from millstream.model.buffered_operations import ReadPause as ReadPause
    from millstream.model.ids import ShardId as ShardId
    from millstream.model.operations import Appended as Appended
    from millstream.model.operations import AppendedTables as AppendedTables
    from millstream.model.operations import WriteOps as WriteOps
    from millstream.model.positions import StreamToken as StreamToken
    from millstream.ports import ShardReader as ShardReader
    from millstream.ports import WriteBuffer as WriteBuffer
    from millstream.serving.checks_for_other_servers import Guard as Guard
    from millstream.serving.problem_documents import problem_of as problem_of

__version__ = "0.1.0"

_PUBLIC = {
    "Appended": ("millstream.model.operations", "Appended"),
    "AppendedTables": ("millstream.model.operations", "AppendedTables"),
    "BufferMeta": ("millstream.model.buffered_operations", "BufferMeta"),
    "BufferOffset": ("millstream.model.buffered_operations", "BufferOffset"),
    "BufferedOp": ("millstream.model.buffered_operations", "BufferedOp"),
    "Following": ("millstream.client.following", "Following"),
    "Latest": ("millstream.client.call_results", "Latest"),
    "Guard": ("millstream.serving.checks_for_other_servers", "Guard"),
    "MillstreamError": ("millstream.errors", "MillstreamError"),
    "OpenHome": ("millstream.app.open_home", "OpenHome"),
    "PlacedReader": ("millstream.codec.buffer_reading", "PlacedReader"),
    "RemoteHome": ("millstream.client.remote_home", "RemoteHome"),
    "ReadPause": ("millstream.model.buffered_operations", "ReadPause"),
    "Session": ("millstream.client.write_session", "Session"),
    "ShardId": ("millstream.model.ids", "ShardId"),
    "ShardReader": ("millstream.ports", "ShardReader"),
    "StreamToken": ("millstream.model.positions", "StreamToken"),
    "WriteBuffer": ("millstream.ports", "WriteBuffer"),
    "WriteOps": ("millstream.model.operations", "WriteOps"),
    "connect": ("millstream.client.remote_home", "connect"),
    "decode_op": ("millstream.codec.buffered_op", "decode_op"),
    "encode_op": ("millstream.codec.buffered_op", "encode_op"),
    "errors": ("millstream.errors", None),
    "open": ("millstream.app.open_home", "open"),
    "problem_of": ("millstream.serving.problem_documents", "problem_of"),
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
