"""Millstream's public test kit: real servers, a clock under control, workloads that use everything, faulty files.

Each name is imported at its first use, so that the kit costs nothing where it isn't used and needs only the packages
of the parts that are.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millstream.testing.catalog import CatalogConformance
    from millstream.testing.catalog_races import CatalogRaces
    from millstream.testing.clock import ManualClock
    from millstream.testing.files import Crash, FaultPlan, MemoryFiles, keep_any, lose_all
    from millstream.testing.in_process import InProcessTransport, LinkFaults
    from millstream.testing.kafka import EmbeddedKafka
    from millstream.testing.memory_buffer import BufferFailure, MemoryBuffer, MemoryServer
    from millstream.testing.postgres import EmbeddedPostgres, PostgresStartError, PostgresUnavailable
    from millstream.testing.push_sink import PushSinkConformance, SinkStage
    from millstream.testing.redis import EmbeddedRedis
    from millstream.testing.s3 import EmbeddedS3
    from millstream.testing.transport import LinkConformance, TransportConformance, TransportStage
    from millstream.testing.workloads.shop import ShopWorkload
    from millstream.testing.workloads.workload import StepInfo, Workload
    from millstream.testing.write_buffer import BufferStage, WriteBufferConformance

_HOMES = {
    "BufferFailure": "memory_buffer",
    "BufferStage": "write_buffer",
    "CatalogConformance": "catalog",
    "CatalogRaces": "catalog_races",
    "Crash": "files",
    "EmbeddedKafka": "kafka",
    "EmbeddedPostgres": "postgres",
    "EmbeddedRedis": "redis",
    "EmbeddedS3": "s3",
    "FaultPlan": "files",
    "InProcessTransport": "in_process",
    "LinkConformance": "transport",
    "LinkFaults": "in_process",
    "ManualClock": "clock",
    "MemoryBuffer": "memory_buffer",
    "MemoryFiles": "files",
    "MemoryServer": "memory_buffer",
    "PostgresStartError": "postgres",
    "PostgresUnavailable": "postgres",
    "PushSinkConformance": "push_sink",
    "ShopWorkload": "workloads.shop",
    "SinkStage": "push_sink",
    "StepInfo": "workloads.workload",
    "TransportConformance": "transport",
    "TransportStage": "transport",
    "Workload": "workloads.workload",
    "WriteBufferConformance": "write_buffer",
    "keep_any": "files",
    "lose_all": "files",
}

__all__ = [
    "BufferFailure",
    "BufferStage",
    "CatalogConformance",
    "CatalogRaces",
    "Crash",
    "EmbeddedKafka",
    "EmbeddedPostgres",
    "EmbeddedRedis",
    "EmbeddedS3",
    "FaultPlan",
    "InProcessTransport",
    "LinkConformance",
    "LinkFaults",
    "ManualClock",
    "MemoryBuffer",
    "MemoryFiles",
    "MemoryServer",
    "PostgresStartError",
    "PostgresUnavailable",
    "PushSinkConformance",
    "ShopWorkload",
    "SinkStage",
    "StepInfo",
    "TransportConformance",
    "TransportStage",
    "Workload",
    "WriteBufferConformance",
    "keep_any",
    "lose_all",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
