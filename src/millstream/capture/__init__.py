"""Capture from PostgreSQL: slot and publications, streaming into the log, table copy, and what `doctor` asks.

It reads; it writes nothing to the source but the slot, publications where they are missing and may be made, and a
heartbeat message. Everything it appends goes through a `ports.LogAppender`; what it must remember is in the catalog.
"""

from __future__ import annotations

from millstream.capture.config import CaptureConfig, CaptureOutcome, CaptureProgress
from millstream.capture.doctor import check_source, doctor_sql, drop_slot, sql_comment
from millstream.capture.doctor_server import Finding
from millstream.capture.run import run_capture

__all__ = [
    "CaptureConfig",
    "CaptureOutcome",
    "CaptureProgress",
    "Finding",
    "check_source",
    "doctor_sql",
    "drop_slot",
    "run_capture",
    "sql_comment",
]
