"""A home's status as a value, for the rules: one stream that does well, changed by each test."""

from __future__ import annotations

import copy
from typing import Any

_WELL: dict[str, Any] = {
    "home": "/srv/shop",
    "processes": {"owner": 1, "pipeline": 2},
    "problems": [],
    "streams": [
        {
            "name": "shop",
            "id": "7",
            "replication": None,
            "regions": [],
            "writers": [],
            "buffer": None,
            "log": {"cut_off": {}},
            "source": {
                "configured": True,
                "slot": "millstream_shop",
                "slot_dropped": False,
                "left": [],
                "mode": "streaming",
                "slot_holds_bytes": 1 << 20,
                "received": "0/10",
                "end": "0/10",
            },
            "errors": {},
            "tokens": {"durable": "7.s9", "landed": "7.s9"},
            "lag": {"lake": {"records": 0}},
            "tables": [{"name": "public.orders", "state": "streaming", "reason": "", "hint": ""}],
            "consumers": [],
        }
    ],
}


def well(**changes: Any) -> dict[str, Any]:
    """Return a status of a stream that does well, except for these keys of the stream; a table of keys is merged."""
    status = copy.deepcopy(_WELL)
    stream = status["streams"][0]
    for key, value in changes.items():
        stream[key] = {**stream[key], **value} if isinstance(value, dict) and stream[key] else value
    return status


def consumer(**changes: Any) -> dict[str, Any]:
    """Return a consumer that has settled everything, except for these keys."""
    fine = {"name": "search", "state": "active", "cursor": "7.s9", "acked": 9, "dead": 0, "error": None}
    return {**fine, "lag": {"records": 0}, **changes}
