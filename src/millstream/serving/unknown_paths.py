"""Errors about unknown parts of a request's address: a path, a method on it, a parameter. Each names the valid ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import SequenceMatcher
from typing import Final

from starlette.requests import Request
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from millstream.errors import HttpError, UsageError

ROWS_PARAMETERS: Final = ("on_clash", "deadline_s")
"""Parameters of the path that takes rows. The paths for lines ignore unknown ones: InfluxDB's clients send
InfluxDB's parameters."""
_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_ALIKE: Final = 0.6
_PART_ALIKE: Final = 0.5
_SHOWN_MAX: Final = 200
_COMPARED_MAX: Final = 100
"""Characters of a path that is compared with the known ones: a caller without a token may send any number of them."""


def check_parameters(said: Iterable[str], known: Collection[str]) -> None:
    """Raise `UsageError` for a parameter that the path doesn't have: a mistyped one would do something else."""
    unknown = sorted(set(said) - set(known))
    if unknown:
        raise UsageError(
            f"there is no parameter {', '.join(unknown)[:_SHOWN_MAX]}",
            hint=f"Use one of: {', '.join(known)}." if known else "This path takes none.",
            parameters=list(known),
        )


async def known_parameters(request: Request) -> None:
    """Check in a FastAPI dependency that the request has only known parameters.

    Health, metrics and `/ping` accept any.
    """
    path = request.url.path
    if request.query_params and (path.startswith("/v1/") or path == "/status"):
        dependant = getattr(request.scope.get("route"), "dependant", None)
        if dependant is not None:
            check_parameters(request.query_params, [field.alias for field in dependant.query_params])


def unknown_path(path: str, templates: Iterable[str]) -> HttpError:
    """Return the error for an unknown path, with the nearest known one.

    Args:
        templates: the known ones, with `{name}` for variable parts.
    """
    path = path[:_SHOWN_MAX]
    compared = templates if len(path) <= _COMPARED_MAX else ()
    likeness, nearest = max(((_likeness(path, template), template) for template in compared), default=(0.0, ""))
    hint = None
    if likeness >= _ALIKE:
        hint = f"Did you mean {nearest}? `/docs` shows all paths."
    return HttpError(f"there is no path {path}", code="unknown_path", hint=hint, path=path)


def method_not_allowed(method: str, path: str, allowed: str) -> HttpError:
    """Return the error for a method that the path doesn't take."""
    return HttpError(
        f"{path[:_SHOWN_MAX]} doesn't support {method[:20]}",
        code="method_not_allowed",
        hint=f"Use {allowed}." if allowed else None,
        method=method[:20],
    )


def _likeness(path: str, template: str) -> float:
    return max(_alike(path.rstrip("/"), template), _alike(f"/v1{path.rstrip('/')}", template))


def _alike(path: str, template: str) -> float:
    asked, known = path.split("/"), template.split("/")
    if len(asked) == len(known):
        # Variable parts are as in the request.
        known = [mine if part.startswith("{") else part for mine, part in zip(asked, known, strict=True)]
        if not all(_ratio(*parts, _PART_ALIKE) for parts in zip(asked, known, strict=True)):
            return 0.0  # another action of the same thing
    return _ratio("/".join(asked), "/".join(known), _ALIKE)


def _ratio(mine: str, known: str, least: float) -> float:
    """Return how much two texts are alike; 0 if that is less than `least`, which is known much sooner."""
    if mine == known:
        return 1.0
    matcher = SequenceMatcher(None, mine, known)
    if matcher.real_quick_ratio() < least or matcher.quick_ratio() < least:
        return 0.0
    found = matcher.ratio()
    return found if found >= least else 0.0


def allowed_at(scope: Scope, routes: Iterable[BaseRoute]) -> str:
    """Return the methods that a request's path takes, of all its routes: each may have one of them."""
    routes = list(routes)
    return ", ".join(
        method
        for method in _METHODS
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)
    )
