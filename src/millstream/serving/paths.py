"""What a request's address says that there isn't: a path, a method on it, a parameter. Each is refused by name, with what there is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from difflib import SequenceMatcher
from typing import Final

from starlette.requests import Request

from millstream.errors import MethodNotAllowed, UnknownPath, UsageError

ROWS_PARAMETERS: Final = ("on_clash", "deadline_s")
"""Of the path that takes rows. Those that take lines leave alone what they don't know: InfluxDB's clients send parameters of its."""
_ALIKE: Final = 0.6
_SHOWN_MAX: Final = 200


def check_parameters(said: Iterable[str], known: Collection[str]) -> None:
    """`UsageError` where an address has a parameter that its path hasn't: mistyped, it would do something else than was meant."""
    unknown = sorted(set(said) - set(known))
    if unknown:
        raise UsageError(
            f"there is no parameter {', '.join(unknown)[:_SHOWN_MAX]}",
            hint=f"There are: {', '.join(known)}." if known else "This path takes none.",
            parameters=list(known),
        )


async def known_parameters(request: Request) -> None:
    """A FastAPI dependency: the request has no parameter that its path hasn't. Who asks for health, metrics or `/ping` may send what it likes."""
    path = request.url.path
    if request.query_params and (path.startswith("/v1/") or path == "/status"):
        dependant = getattr(request.scope.get("route"), "dependant", None)
        if dependant is not None:
            check_parameters(request.query_params, [field.alias for field in dependant.query_params])


def unknown_path(path: str, templates: Iterable[str]) -> UnknownPath:
    """That there is no such path, and the nearest one that there is.

    Args:
        path: as it was asked for.
        templates: those that there are, with `{name}` for what varies.
    """
    path = path[:_SHOWN_MAX]
    nearest = max(templates, key=lambda template: _likeness(path, template), default="")
    hint = None
    if nearest and _likeness(path, nearest) >= _ALIKE:
        hint = f"Did you mean {nearest}? `/docs` shows all paths."
    return UnknownPath(f"there is no path {path}", hint=hint, path=path)


def method_not_allowed(method: str, path: str, allowed: str) -> MethodNotAllowed:
    """That the path takes other methods."""
    return MethodNotAllowed(
        f"{path[:_SHOWN_MAX]} takes no {method[:20]}",
        hint=f"It takes {allowed}." if allowed else None,
        method=method[:20],
    )


def _likeness(path: str, template: str) -> float:
    return max(_alike(path.rstrip("/"), template), _alike(f"/v1{path.rstrip('/')}", template))


def _alike(path: str, template: str) -> float:
    asked, known = path.split("/"), template.split("/")
    if len(asked) == len(known):
        # What varies is as it was asked for.
        known = [mine if part.startswith("{") else part for mine, part in zip(asked, known, strict=True)]
    return SequenceMatcher(None, "/".join(asked), "/".join(known)).ratio()


def allowed_of(headers: Mapping[str, str] | None) -> str:
    """The methods that a refusal says there are."""
    return (headers or {}).get("Allow", "")
