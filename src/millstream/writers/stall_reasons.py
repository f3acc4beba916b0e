"""Why a part of a stream makes no progress: from the part's process, or from its notes if it has ended."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from millstream.errors import MillstreamError, may_pass
from millstream.home.missing_logs import find_missing_part
from millstream.processes.control_socket import ask
from millstream.processes.role_locks import holder

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from millstream.catalog import Catalog
    from millstream.home.home import Home
    from millstream.home.paths import HomePaths

Part: TypeAlias = Literal["capture", "pipeline", "log"]
_GIVEN_UP: Final = "given_up"


def note_given_up(catalog: Catalog, name: str, part: Part, error: MillstreamError) -> None:
    """Record the error that ended a part of a stream, and since when it does, for after its process has ended.

    The catalog needn't have the stream: the part may fail before its log is begun. The time stays that of the first of
    several same errors. An unwritable catalog is ignored.
    """
    with contextlib.suppress(MillstreamError):
        scope = _scope(part, name)
        noted = catalog.fact(scope, _GIVEN_UP) or {}
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        since = noted.get("since", now) if noted.get("code") == error.code else now
        catalog.put_fact(scope, _GIVEN_UP, error.as_dict() | {"since": since})


def forget_given_up(catalog: Catalog, name: str, part: Part) -> None:
    """Clear the record: the part makes progress, or an operator has decided.

    An unwritable catalog is ignored.
    """
    with contextlib.suppress(MillstreamError):
        if catalog.fact(_scope(part, name), _GIVEN_UP) is not None:
            catalog.drop_fact(_scope(part, name), _GIVEN_UP)


def trouble_of(
    home: Home, catalog: Catalog, name: str, part: Part, live: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Return why a part of a stream stands still; None if it doesn't, or was told to stop.

    Args:
        live: the facts of the process that runs it; None if none does.

    Returns:
        The error's `code`, `message`, `hint`, `retry` and `details`; `gave_up`: whether it isn't retried
        automatically; and `since`, the time of the end that it caused, None if it caused none.
    """
    noted = catalog.fact(_scope(part, name), _GIVEN_UP) or {}
    error = (live or {}).get("error")
    if live is None or part == "pipeline":
        error = error or noted  # a pipeline that was started again may have landed nothing since
    if not error:
        return None
    if live is not None:
        gave_up = bool(live.get("gave_up"))
    else:
        # `run` starts a pipeline's process again after these; capture records an error that is final for it.
        restarts = part == "pipeline" and may_pass(error.get("code"), error.get("retry"))
        gave_up = not (restarts and holder(home.run_folder, "run"))
    since = noted.get("since") if noted.get("code") == error["code"] else None
    return {**error, "gave_up": gave_up, "since": since}


def part_errors(
    home: Home, catalog: Catalog, name: str, live: tuple[dict[str, Any] | None, dict[str, Any] | None]
) -> dict[Part, dict[str, Any]]:
    """Return by part why it stands still, as `trouble_of` does; `log`: it, or one of its shards, was moved or removed.

    Args:
        live: the facts of the processes that run its capture and its pipeline.
    """
    parts: tuple[tuple[Part, dict[str, Any] | None], ...] = tuple(zip(("capture", "pipeline"), live, strict=True))
    found = {part: error for part, facts in parts if (error := trouble_of(home, catalog, name, part, facts))}
    missing = find_missing_part(home, name, catalog)
    return found if missing is None else found | {"log": missing.as_dict() | {"gave_up": True, "since": None}}


def server_errors(home: HomePaths) -> dict[str, dict[str, Any]]:
    """Return, by `serve`, why the server of a `run` doesn't listen: `code`, `message`, `hint`, `gave_up`. Empty if it does."""
    error = holder(home.run_folder, "run").get("server_error")
    return {"serve": error} if error else {}


def troubles(home: Home) -> list[dict[str, Any]]:
    """Return the troubles of streams: each with `stream`, `part`, `code`, `message`, `hint`, `gave_up`, `since`.

    Asks the running processes and the catalog, not the lake. A catalog that can't be read yields nothing.
    """
    owner, pipeline = ((ask(home, role, "status") or {}).get("streams", {}) for role in ("owner", "pipeline"))
    found: list[tuple[str, Part, dict[str, Any] | None]] = []
    with contextlib.suppress(MillstreamError):
        if home.has_catalog():
            with home.open_catalog() as catalog:
                names = {row.name for row in catalog.streams()}
                with contextlib.suppress(MillstreamError):  # a configuration that can't be read
                    names |= set(home.config.streams)
                for name in sorted(names):
                    parts: dict[Part, Any] = {"capture": owner.get(name), "pipeline": pipeline.get(name)}
                    for part, live in parts.items():
                        found.append((name, part, trouble_of(home, catalog, name, part, live)))
    return sorted_troubles(found)


def sorted_troubles(found: Iterable[tuple[str, Part, Mapping[str, Any] | None]]) -> list[dict[str, Any]]:
    """Return the troubles among what `trouble_of` returned, by stream and part, as `troubles` does."""
    return [
        {
            "stream": stream,
            "part": part,
            **{key: error.get(key, "") for key in ("code", "message", "hint")},
            "gave_up": error["gave_up"],
            "since": error["since"],
        }
        for stream, part, error in sorted(found, key=lambda one: one[:2])
        if error
    ]


def _scope(part: Part, name: str) -> str:
    return f"{part}/{name}"
