"""Logic without I/O, as generators that yield what to do: written once, run by threads and by tasks.

A generator yields a step, receives its result (or the error that it raised) and returns in the end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import TypeVar

_Step = TypeVar("_Step")
_Done = TypeVar("_Done")
_Result = TypeVar("_Result")


def run(steps: Generator[_Step, _Done, _Result], do: Callable[[_Step], _Done]) -> _Result:
    """Do each step, blocking, and return the generator's result."""
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


async def run_async(steps: Generator[_Step, _Done, _Result], do: Callable[[_Step], Awaitable[_Done]]) -> _Result:
    """Do each step as `run`, for a task."""
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
