"""Spark jobs: a function over a list of tasks, and what crosses to the executors and back.

Tasks name values that hold secrets (a lake's keys, a database's password, a Flight token). Spark writes a job's
elements to files and cached blocks, and large answers too. So these values aren't in them: they travel in the
task's closure, once a job, and elements and answers refer to them by number.

An error of ours is an answer: it crosses whole, with its code. Spark repeats a task only for other failures.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar, cast

from pyspark import SparkContext

import millstream
from millstream.errors import EngineError, MillstreamError
from millstream.lake.layout import LakeLayout
from millstream.lake.postgres.target import PostgresTarget
from millstream.wal.flight_log import FlightLog

_HOLDERS: Final = frozenset({LakeLayout, PostgresTarget, FlightLog})
"""Types whose values hold secrets."""
_Task = TypeVar("_Task")
_Answer = TypeVar("_Answer")


def run_job(
    context: SparkContext, function: Callable[[_Task], _Answer], tasks: Sequence[_Task], slices: int | None = None
) -> list[_Answer]:
    """Run one Spark job; return the answers in the order of the tasks, without a job if there are none.

    Args:
        function: of a module that executors have.
        slices: the number of Spark's own tasks among which they are divided; default: one each.

    Raises:
        MillstreamError: the function raised it for one of the tasks.
        EngineError (`executor_version`): an executor has another version of Millstream.
    """
    if not tasks:
        return []
    secrets: list[object] = []
    elements = [_pickled(task, secrets, adds=True) for task in tasks]
    call = partial(_call, millstream.__version__, pickle.dumps((function, secrets)))
    answers = [
        _unpickled(found, secrets) for found in context.parallelize(elements, slices or len(tasks)).map(call).collect()
    ]
    for answer in answers:
        if isinstance(answer, _Raised):
            raise answer.error
    return cast("list[_Answer]", answers)


@dataclass(frozen=True, slots=True)
class _Raised:
    """An error in place of an answer."""

    error: MillstreamError


def _call(version: str, closure: bytes, element: bytes) -> bytes:
    """Run one task in an executor."""
    if version != millstream.__version__:
        # Nothing is unpickled before this: another version may lack its classes.
        error = EngineError(
            f"an executor has Millstream {millstream.__version__}, and the driver {version}", code="executor_version"
        )
        return pickle.dumps(_Raised(error))
    function, secrets = pickle.loads(closure)  # noqa: S301 - the driver's own
    try:
        answer = function(_unpickled(element, secrets))
    except MillstreamError as error:
        answer = _Raised(error)
    return _pickled(answer, secrets, adds=False)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, secrets: list[object], *, adds: bool) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._secrets, self._adds = secrets, adds

    def persistent_id(self, value: Any) -> int | None:
        if type(value) not in _HOLDERS:
            return None
        if value not in self._secrets:
            assert self._adds, "an answer's values with secrets are the task's"
            self._secrets.append(value)
        return self._secrets.index(value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, secrets: list[object]) -> None:
        super().__init__(file)
        self._secrets = secrets

    def persistent_load(self, number: Any) -> object:
        return self._secrets[number]


def _pickled(value: object, secrets: list[object], *, adds: bool) -> bytes:
    file = io.BytesIO()
    _Pickler(file, secrets, adds=adds).dump(value)
    return file.getvalue()


def _unpickled(data: bytes, secrets: list[object]) -> Any:
    return _Unpickler(io.BytesIO(data), secrets).load()
