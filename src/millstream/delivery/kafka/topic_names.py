"""Names of Kafka topics by a template."""

from __future__ import annotations

import re
from typing import Final

TOPIC: Final = "{stream}.{schema}.{table}"
"""The template if none is configured."""
MESSAGES_TOPIC: Final = "{stream}.message"
"""The template for logical messages, as Debezium names their topic."""
_REFUSED: Final = re.compile(r"[^a-zA-Z0-9._-]")
"""Characters that a topic's name can't have."""


def topic_name(template: str, stream: str, namespace: str, table: str) -> str:
    """Return a topic's name; each character that Kafka refuses becomes `_`."""
    name = template.replace("{stream}", stream).replace("{schema}", namespace).replace("{table}", table)
    return _REFUSED.sub("_", name)
