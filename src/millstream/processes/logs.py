"""Logging of processes: structlog on stderr, in lines for people, or as JSON lines on request.

Nothing is masked here: the caller masks an address before it logs it, by `model.addresses.mask_address`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, Literal, TextIO, cast

import structlog

from millstream.model.human_text import readable

LogFormat = Literal["text", "json"]
LEVEL_VARIABLE = "MILLSTREAM_LOG_LEVEL"


def configure_logs(
    *, part: str = "", style: LogFormat = "text", for_home: Callable[[str], str] = lambda hint: hint
) -> None:
    """Set up this process's logs. Every line has `part`, if it is given. `MILLSTREAM_LOG_LEVEL` sets the level.

    `for_home` completes the commands of a hint for people, so that they act on this process's home.
    """
    level = logging.getLevelName(os.environ.get(LEVEL_VARIABLE, "info").upper())

    def name_part(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        # Not by contextvars: threads start with none.
        return {**event, "part": part} if part else event

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            name_part,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str)
            if style == "json"
            else Words(terminal=sys.stderr.isatty(), for_home=for_home),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level if isinstance(level, int) else logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Lines())),
        cache_logger_on_first_use=True,
    )


def leave_logs_to_application() -> None:
    """Send events to `logging`, under `millstream.*`, in a process that isn't ours and hasn't set structlog up."""
    if not structlog.is_configured():
        structlog.configure(
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.processors.format_exc_info,
                Words(terminal=False),
            ],
            wrapper_class=structlog.stdlib.BoundLogger,
            logger_factory=structlog.stdlib.LoggerFactory(),
        )


class _Lines(io.TextIOBase):
    """Stderr, with its errors ignored: on a full disk or a closed pipe a line is lost, and everything goes on."""

    def write(self, text: str, /) -> int:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


class Words:
    """A structlog renderer: one short line for people, like those of `run`; a repeated error is shorter still.

    The hint of a warning follows on a line of its own, that of an error that is waited for once.
    """

    def __init__(self, *, terminal: bool, for_home: Callable[[str], str] = lambda hint: hint) -> None:
        # `run` redraws a line there: a log line replaces it.
        self._clear = "\r\x1b[K" if terminal else ""
        self._for_home = for_home
        self._trouble: dict[tuple[str, str], str] = {}

    def __call__(self, _logger: object, _method: str, event: structlog.typing.EventDict) -> str:
        """Render one event."""
        facts: dict[str, Any] = {name: value for name, value in event.items() if name != "timestamp"}
        part, stream = str(facts.pop("part", "")), str(facts.pop("stream", ""))
        level, what = facts.pop("level", "info"), str(facts.pop("event", ""))
        error, code, wait_s = facts.pop("error", None), str(facts.pop("code", "")), facts.pop("in_s", None)
        trace, hint = facts.pop("exception", None), facts.pop("hint", None)
        hints: list[str] = []
        who = ", ".join(filter(None, (part, stream and f"stream {stream}")))
        words = f"{who}: " if who else ""
        if error is not None:
            trouble = ": ".join(filter(None, (code, "; ".join(str(error).splitlines()))))
            if wait_s is None:
                what = f"{what}: {trouble}"
            elif self._trouble.get((part, stream)) == trouble:
                what = f"still {'unreachable' if code == 'source_unreachable' else code}"
            else:
                what, hints = trouble, [f"  hint: {self._for_home(str(hint))}"] if hint else []
            self._trouble[part, stream] = trouble if wait_s is not None else ""
        elif level in {"warning", "error", "critical"}:
            words += "".join(f"{said}: " for said in (level, code) if said)
            hints = [f"  hint: {self._for_home(str(hint))}"] if hint else []
        words += what
        if wait_s is not None:
            words += f"; next try in {float(wait_s):.1f} s"
        if facts:
            words += f" ({', '.join(f'{name} {value}' for name, value in facts.items())})"
        lines = [readable(line) for line in (words, *hints, *(str(trace).split("\n") if trace else ()))]
        return self._clear + "\n".join(lines)
