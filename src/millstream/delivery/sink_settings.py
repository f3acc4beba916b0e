"""Reading the settings of a push sink, which come from a request's body or from the configuration file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from millstream.errors import DeliveryError
from millstream.model.durations import duration_s


class SinkSettings:
    """The settings of one sink, read one by one.

    Args:
        sink: the name of the table, which errors show.
        settings: what was written.
        known: the settings that there are.
        unoffered: those that hints don't name, since they would be refused here.

    Raises:
        DeliveryError (`invalid_consumer`): it is no table, or has an unknown setting. The readers below raise it, too.
    """

    def __init__(self, sink: str, settings: object, known: Collection[str], unoffered: Collection[str] = ()) -> None:
        self._sink = sink
        offered = f"Use: {', '.join(name for name in known if name not in unoffered)}."
        if not isinstance(settings, Mapping):
            raise _refusal(f"{sink} isn't an object", sink, offered)
        self._settings: Mapping[str, Any] = settings
        unknown = [str(name)[:80] for name in settings if name not in known]
        if unknown:
            self.refuse(unknown[0], "isn't a setting", offered)

    def refuse(self, name: str, problem: str, hint: str | None = None) -> NoReturn:
        """Raise `invalid_consumer` about one setting."""
        raise _refusal(f"{self._sink}.{name} {problem}", f"{self._sink}.{name}", hint)

    def value(self, name: str) -> Any:
        """Return a setting as it was written; None if it wasn't."""
        return self._settings.get(name)

    def text(self, name: str, default: str | None = None, *, hint: str | None = None) -> str:
        """Return a text that isn't empty. Without a default it is required."""
        value = self._settings.get(name)
        if value is None:
            if default is None:
                self.refuse(name, "is missing", hint)
            return default
        if not isinstance(value, str) or not value:
            self.refuse(name, "isn't a text" if value != "" else "is empty", hint)
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return true or false."""
        value = self._settings.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, "is neither true nor false")
        return value

    def whole(self, name: str, default: int, least: int, most: int) -> int:
        """Return a whole number within bounds."""
        value = self._settings.get(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self.refuse(name, f"isn't a whole number from {least} to {most}")
        return value

    def seconds(self, name: str, default: str, most: str) -> float:
        """Return the seconds of a duration that is longer than none, and at most `most`."""
        value = self._settings.get(name)
        text = default if value is None else value
        try:
            seconds = duration_s(text) if isinstance(text, str) else 0.0
        except ValueError:
            seconds = 0.0
        if not 0 < seconds <= duration_s(most):
            self.refuse(name, f"isn't a duration of at most {most}", f"Write a number and a unit, such as {default}.")
        return seconds


def _refusal(problem: str, field: str, hint: str | None) -> DeliveryError:
    return DeliveryError(problem, code="invalid_consumer", hint=hint, field=field)
