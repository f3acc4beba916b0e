"""Names of Redis streams by a template; Kafka's settings check theirs by `template_fault`, too."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from millstream.delivery.sinks import PushMessage
from millstream.model.names import parse_qualified_name

DEFAULT: Final = "{stream}.{schema}.{table}"
_FIELD: Final = re.compile(r"\{([^{}]*)\}")
_FIELDS: Final = ("stream", "schema", "table")
_MESSAGES: Final = "{stream}.message"


def template_fault(template: str) -> str | None:
    """Return why a text can't be a template; None if it can."""
    unknown = [name for name in _FIELD.findall(template) if name not in _FIELDS]
    if unknown:
        return f"has an unknown field {{{unknown[0][:80]}}}"
    if "{" in _FIELD.sub("", template) or "}" in _FIELD.sub("", template):
        return "has a brace without its partner"
    return None


class Destinations:
    """The destination of each message.

    Args:
        template: a text with `{stream}`, `{schema}` and `{table}`, without a `template_fault`.
        stream: the stream's name.

    A logical message has no table: it goes to `{stream}.message` if the template contains a schema or a table.
    """

    def __init__(self, template: str, stream: str) -> None:
        self._template = template
        self._stream = stream
        self._of_table = lru_cache(10_000)(self._name)

    def of(self, message: PushMessage) -> str:
        """Return the name of a message's destination."""
        return self._of_table(message.value["table"])

    def _name(self, table: str | None) -> str:
        template, values = self._template, {"stream": self._stream}
        if table is not None:
            values["schema"], values["table"] = parse_qualified_name(table)
        elif "{schema}" in template or "{table}" in template:
            template = _MESSAGES
        return _FIELD.sub(lambda match: values[match[1]], template)
