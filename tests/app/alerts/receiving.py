"""The requests that a receiver of alerts got, verified as an operator's program does."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

from tests.delivery.receivers import Receiver

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()


def alerts_of(receiver: Receiver) -> list[dict[str, Any]]:
    """Return the bodies of the requests; the signature of each is right."""
    found = []
    for request in receiver.requests:
        content = b"%b.%b.%b" % (
            request.headers["webhook-id"].encode(),
            request.headers["webhook-timestamp"].encode(),
            request.body,
        )
        digest = hmac.new(bytes(range(32)), content, hashlib.sha256).digest()
        assert request.headers["webhook-signature"] == "v1," + base64.b64encode(digest).decode()
        assert request.headers["content-type"] == "application/json"
        found.append(json.loads(request.body))
    return found


def told(receiver: Receiver) -> list[tuple[str, str, str]]:
    """Return type, condition and subject of each alert that was received."""
    return [(one["type"], one["data"]["condition"], one["data"]["subject"]) for one in alerts_of(receiver)]
