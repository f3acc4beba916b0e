"""InfluxDB's line protocol: lines of measurements, tags, fields and times. `grammar` has the rules."""

from __future__ import annotations

from millstream.codec.line_protocol.grammar import REASONS, Fault, Kind
from millstream.codec.line_protocol.plain import Field, PlainFault, PlainLine, parse_plain

__all__ = ["REASONS", "Fault", "Field", "Kind", "PlainFault", "PlainLine", "parse_plain"]
