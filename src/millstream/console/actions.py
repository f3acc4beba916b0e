"""Actions on tables and consumers: which are offered, what each asks first, and their audit log.

An action needs the right `admin` on its stream and a token to have it by: without tokens the console only reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import structlog

from millstream.app import table_requests
from millstream.console.html import Content, Html, tag
from millstream.errors import AccessError, MillstreamError, UsageError
from millstream.leadership.node_roles import Roles
from millstream.private_files import make_folder, open_private
from millstream.writers.write_buffers import buffer_of

if TYPE_CHECKING:
    from millstream.catalog import Catalog
    from millstream.console.diff_page import Comparison, Diffs
    from millstream.home.home import Home
    from millstream.model.ids import StreamId
    from millstream.writers.home_consumers import HomeConsumers

logger = structlog.get_logger("millstream.serve")

OnTable: TypeAlias = "Callable[[Catalog, StreamId, str], str]"


@dataclass(frozen=True, slots=True)
class Action:
    """A kind of action."""

    label: str
    warning: str = ""
    """The effect that a viewer has to confirm; empty if it destroys nothing."""
    field: str = ""
    """Title of the text that it takes."""
    on_table: OnTable | None = None
    """Carries it out on a table; None for an action on a consumer."""
    on_consumer: str = ""
    """The consumer's request that carries it out."""


ACTIONS: Final[Mapping[str, Action]] = {
    "retry": Action("Try again", on_table=table_requests.retry_table),
    "copy": Action(
        "Copy again",
        "All rows of the table are read from the source again, while its changes are captured.",
        on_table=table_requests.copy_table,
    ),
    "pause_copy": Action("Pause the copy", on_table=table_requests.pause_table),
    "resume_copy": Action("Resume the copy", on_table=table_requests.resume_table),
    "pause": Action("Pause", on_consumer="pause"),
    "resume": Action("Resume", on_consumer="resume"),
    "rewind": Action(
        "Rewind",
        "The consumer begins at another place: messages are delivered again, or never if the place is a later one.",
        "To (earliest, latest, a token or a time)",
        on_consumer="rewind",
    ),
    "retry_dead": Action("Deliver all dead letters again", on_consumer="retry"),
    "drop_dead": Action(
        "Drop all dead letters", "The consumer's dead letters are forgotten and never delivered.", on_consumer="drop"
    ),
    "retry_letter": Action("Deliver again", on_consumer="retry"),
    "drop_letter": Action("Drop", "The message is forgotten and never delivered.", on_consumer="drop"),
}
_FITTING: Final = {
    "quarantined": "retry",
    "copying": "pause_copy",
    "copy_requested": "pause_copy",
    "paused": "resume_copy",
}
"""The action that fits a table's state, next to another copy."""
_REFUSED_CHARS_MAX: Final = 200
"""Characters of each field of a refused action in the audit log: any token may have it written."""
_ALL_LETTERS: Final = frozenset({"retry_dead", "drop_dead"})
_ONE_LETTER: Final = frozenset({"retry_letter", "drop_letter"})
"""Actions on the dead letter that the text names."""


@dataclass(frozen=True, slots=True)
class Order:
    """An action that a viewer has asked for."""

    who: str
    """The name of the viewer's token."""
    name: str
    stream: str
    subject: str
    """The table or the consumer."""
    text: str = ""
    """The text that the action takes."""

    @property
    def action(self) -> Action:
        """The action; `UsageError` if there is none of that name."""
        found = ACTIONS.get(self.name)
        if found is None:
            raise UsageError(f"there is no action {self.name[:40]}")
        return found


def offered_on_table(table: Mapping[str, Any]) -> list[str]:
    """Return the actions that fit a table's state."""
    found = [_FITTING[table["state"]]] if table["state"] in _FITTING else []
    can_be_copied = table["captured"] and (found or table["state"] in {"copy_held", "streaming"})
    return [*found, "copy"] if can_be_copied else found


def offered_on_consumer(consumer: Mapping[str, Any]) -> list[str]:
    """Return the actions that fit a consumer's state."""
    dead = ["retry_dead", "drop_dead"] if consumer["dead"] else []
    return [*dead, "resume" if consumer["state"] == "paused" else "pause", "rewind"]


def buttons(names: list[str], stream: str, subject: str) -> Html | None:
    """Return the buttons of some actions on a table or a consumer."""
    if not names:
        return None
    forms = [order_form(Order("", name, stream, subject)) for name in names]
    return tag("section", tag("h2", "Actions"), tag("div", *forms, class_="row"))


def order_form(order: Order, *, is_confirmed: bool = False) -> Html:
    """Return the form that asks for an action; its text can be written unless it is to be confirmed."""
    action = order.action
    hidden = {"action": order.name, "stream": order.stream, "subject": order.subject}
    if is_confirmed or order.text:
        hidden |= {"text": order.text}
    if is_confirmed:
        hidden |= {"confirmed": "yes"}
    text = None
    if action.field and not is_confirmed:
        text = tag("label", f"{action.field} ", tag("input", name="text", required=True, size=24))
    return tag(
        "form",
        *(tag("input", type="hidden", name=name, value=value) for name, value in hidden.items()),
        text,
        tag("button", f"Yes: {action.label.lower()}" if is_confirmed else action.label, type="submit"),
        method="post",
        action="/console/act",
        class_="row",
    )


def question(order: Order) -> list[Content]:
    """Return what asks a viewer before an action destroys something."""
    to = f" {'to ' if order.action.field else ''}{order.text}" if order.text else ""
    return [
        tag("p", f"{order.action.label}{to}: {order.subject}, stream {order.stream}."),
        tag("p", order.action.warning, class_="trouble warning"),
        order_form(order, is_confirmed=True),
    ]


def carry_out(home: Home, consumers: HomeConsumers, order: Order) -> str:
    """Carry out an action, with entries in the audit log; return what happens. Blocks.

    Raises:
        AccessError (`audit_unwritable`): the audit log can't be written; nothing was done.
        ReadOnly, Fenced: another node leads the stream.
        MillstreamError: as the action.
    """
    action = order.action
    with _asked(home, order):
        outcome = _done(home, consumers, order, action)
    _note(home, order, "done", message=outcome)
    return outcome


def start_diff(home: Home, diffs: Diffs, order: Order) -> None:
    """Start a comparison with the source; the audit log gets its outcome too. Blocks; raises as `carry_out` and `Diffs.start`."""
    home.written_stream(order.stream)

    def note_end(one: Comparison) -> None:
        counts = {} if one.report is None else {"counts": one.report["counts"]}
        texts = {name: text for name, text in (("message", one.said), ("stopped_by", one.stopped_by)) if text}
        try:
            _note(home, order, one.outcome, seconds=one.seconds, **counts, **texts)
        except AccessError as error:  # it has ended all the same
            logger.warning("a comparison's end isn't in the audit log", error=error.message)

    with _asked(home, order):
        diffs.start(order.who, order.stream, order.subject, on_end=note_end)


def note_refused(home: Home, order: Order, error: AccessError) -> None:
    """Note in the audit log that a viewer lacks the right for an action. Blocks; raises `AccessError` (`audit_unwritable`)."""
    cut = replace(
        order, **{name: getattr(order, name)[:_REFUSED_CHARS_MAX] for name in ("name", "stream", "subject", "text")}
    )
    _note(home, cut, "refused", code=error.code, message=error.message)


@contextmanager
def _asked(home: Home, order: Order) -> Iterator[None]:
    """Note that an action is asked for, and refused if the block raises an error."""
    _note(home, order, "asked")
    try:
        yield
    except MillstreamError as error:
        _note(home, order, "refused", code=error.code, message=error.message)
        raise


def _done(home: Home, consumers: HomeConsumers, order: Order, action: Action) -> str:
    if action.on_table is None:
        body: dict[str, Any] = {"to": order.text} if action.field else {}
        if order.name in _ALL_LETTERS | _ONE_LETTER:
            body = {"ids": [order.text] if order.name in _ONE_LETTER else "all"}
        answer = consumers.call(order.stream, action.on_consumer, order.subject, body).body
        if order.name in _ONE_LETTER:
            return f"{order.text}: {answer['results'][0]['status']}"
        return f"{action.label}: done for consumer {order.subject}"
    config = home.written_stream(order.stream)
    if home.config.replication.nodes:
        Roles(home).check_leads(order.stream)
    with home.open_catalog() as catalog:
        stream = catalog.stream(order.stream).id
        if order.name == "retry":
            return table_requests.retry_table(catalog, stream, order.subject, buffer=buffer_of(order.stream, config))
        return action.on_table(catalog, stream, order.subject)


def _note(home: Home, order: Order, outcome: str, **facts: Any) -> None:
    """Add a line to the audit log; `AccessError` (`audit_unwritable`) with the outcome if it can't be written."""
    said = {"token": order.who, "action": order.name, "stream": order.stream, "subject": order.subject}
    said |= {"text": order.text} if order.text else {}
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = json.dumps({"at": at, **said, "outcome": outcome, **facts})
    try:
        make_folder(home.audit_file.parent)
        with open(home.audit_file, "a", opener=open_private, encoding="utf-8") as file:
            file.write(f"{line}\n")
    except OSError as error:
        raise AccessError(
            f"the audit log {home.audit_file} can't be written: {error}",
            code="audit_unwritable",
            outcome=outcome,
        ) from error
