"""Logic that threads and tasks share, written once as generators.

A generator yields a step, receives its result (or the error that it raised) and returns in the end. A step is a value
that a driver carries out (`run`, `run_async`). In a class with an async twin, methods of the same name block in one
class and are coroutines in the other. There, the generator yields their result as a coroutine would await it:
`blocking` makes a method of the one class from it, `awaiting` its twin.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

_Step = TypeVar("_Step")
_Done = TypeVar("_Done")
_Result = TypeVar("_Result")
_Self = TypeVar("_Self")
_P = ParamSpec("_P")

Steps: TypeAlias = Generator[Any, Any, _Result]


def _itself(step: Any) -> Any:
    return step


def run(steps: Generator[_Step, _Done, _Result], do: Callable[[_Step], _Done] = _itself) -> _Result:
    """Do each step, blocking, and return the generator's result. By default each step is its own result."""
    try:
        step = next(steps)
        while True:
            try:
                done = do(step)
            except BaseException as error:  # noqa: BLE001 (the generator raises it again, or handles it)
                step = steps.throw(error)
            else:
                step = steps.send(done)
    except StopIteration as end:
        result: _Result = end.value
        return result


async def run_async(
    steps: Generator[_Step, _Done, _Result], do: Callable[[_Step], Awaitable[_Done]] = _itself
) -> _Result:
    """Do each step as `run`, for a task. By default each step is awaited."""
    try:
        step = next(steps)
        while True:
            try:
                done = await do(step)
            except BaseException as error:  # noqa: BLE001 (the generator raises it again, or handles it)
                step = steps.throw(error)
            else:
                step = steps.send(done)
    except StopIteration as end:
        result: _Result = end.value
        return result


def blocking(steps: Callable[Concatenate[_Self, _P], Steps[_Result]]) -> Callable[Concatenate[_Self, _P], _Result]:
    """Make a method of a generator that yields results of the object's blocking methods."""

    @wraps(steps)
    def call(self: _Self, /, *args: _P.args, **named: _P.kwargs) -> _Result:
        return run(steps(self, *args, **named))

    signature = inspect.signature(steps)
    returned = str(signature.return_annotation).removeprefix("Steps[").removesuffix("]")
    call.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
    return call


def awaiting(
    method: Callable[Concatenate[Any, _P], _Result],
) -> Callable[Concatenate[Any, _P], Coroutine[Any, Any, _Result]]:
    """Make a coroutine of a `blocking` method, for a class with coroutines of the names that the generator calls."""
    steps: Callable[..., Steps[_Result]] = method.__wrapped__  # type: ignore[attr-defined]

    @wraps(method)
    async def call(self: Any, /, *args: _P.args, **named: _P.kwargs) -> _Result:
        return await run_async(steps(self, *args, **named))

    return call
