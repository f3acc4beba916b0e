"""Capture from PostgreSQL: slot and publications, streaming into the log, table copy, and the checks of `doctor`.

It reads. It writes nothing to the source except the slot, publications if they are missing and may be created, and a
heartbeat message. It appends through a `ports.LogAppender`; its durable state is in the catalog.
"""

from __future__ import annotations

from millstream.capture.config import CaptureConfig, CaptureOutcome, CaptureProgress
from millstream.capture.run import run_capture
from millstream.capture.server_checks import Finding
from millstream.capture.source_checks import check_source, doctor_sql, drop_slot, look_at_slot, sql_comment

__all__ = [
    "CaptureConfig",
    "CaptureOutcome",
    "CaptureProgress",
    "Finding",
    "check_source",
    "doctor_sql",
    "drop_slot",
    "look_at_slot",
    "run_capture",
    "sql_comment",
]
