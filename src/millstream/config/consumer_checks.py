"""Mistakes in a stream's consumers that only the reader of definitions detects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from millstream.config.consumer_model import ConsumerConfig
from millstream.config.toml_lines import KeyPath
from millstream.errors import DeliveryError


def clashes_of_consumers(at: KeyPath, consumers: Mapping[str, ConsumerConfig]) -> Iterator[tuple[KeyPath, str]]:
    """Yield the path of each mistake, and its description."""
    if not consumers:
        return
    from millstream.delivery.definition import Definition

    for name, consumer in consumers.items():
        where: KeyPath = (*at, "consumers", name)
        try:
            Definition.parse(consumer.body(name), is_trusted=True)
        except DeliveryError as error:
            field = str(error.details.get("field") or "name")
            place = where if field == "name" else (*where, *field.split("."))
            yield place, f"{error.message}. {error.hint}" if error.hint else error.message
