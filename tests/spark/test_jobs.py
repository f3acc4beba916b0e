"""Elements and answers of jobs: no secret in elements and answers, and errors whole."""

from __future__ import annotations

import pickle
from uuid import UUID

import pytest
from py4j.protocol import Py4JError

from millstream.errors import EngineError, LakeUnavailable, LogTruncated, MillstreamError
from millstream.lake.layout import LakeLayout
from millstream.lake.postgres.target import PostgresTarget
from millstream.model.ids import StreamId
from millstream.spark import jobs
from millstream.spark.executor_access import translated
from millstream.wal.flight_log import FlightLog

STREAM = StreamId(UUID(int=7))
HOLDERS = (
    LakeLayout("s3://bucket/lake", "shop", STREAM, storage_options={"AWS_SECRET_ACCESS_KEY": "PASSWORD"}),
    PostgresTarget("postgresql://app:PASSWORD@db/shop", "shop", STREAM),
    FlightLog("127.0.0.1:1", "shop", token="mst_PASSWORD"),
)


class _Context:
    """A Spark that runs tasks here, and keeps what it would write to files: elements and answers."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closures: list[bytes] = []

    def parallelize(self, elements: list[bytes], _slices: int) -> _Context:
        self.written += elements
        self._elements = elements
        return self

    def map(self, call: object) -> _Context:
        self.closures.append(pickle.dumps(call))
        self._call = pickle.loads(self.closures[-1])
        return self

    def collect(self) -> list[bytes]:
        answers = [self._call(element) for element in self._elements]
        self.written += answers
        return answers


def _same(task: object) -> object:
    return task


def _fails(_task: object) -> object:
    raise LogTruncated("it was so", persisted_upto=7)


@pytest.mark.parametrize("holder", HOLDERS, ids=lambda holder: type(holder).__name__)
def test_values_with_secrets_are_in_the_closure_and_in_nothing_that_spark_writes(holder: object) -> None:
    context = _Context()
    tasks = [(holder, number) for number in range(3)]
    assert jobs.run_job(context, _same, tasks) == tasks  # type: ignore[arg-type]
    assert not [data for data in context.written if b"PASSWORD" in data]
    assert b"PASSWORD" in context.closures[0]


@pytest.mark.parametrize("holder", HOLDERS, ids=lambda holder: type(holder).__name__)
def test_no_secret_is_in_the_text_of_such_a_value(holder: object) -> None:
    assert "PASSWORD" not in repr(holder)


def test_an_error_of_ours_is_raised_in_the_driver_with_its_code_and_details() -> None:
    with pytest.raises(LogTruncated, match="it was so") as caught:
        jobs.run_job(_Context(), _fails, [1])  # type: ignore[arg-type]
    assert caught.value.details == {"persisted_upto": 7}


def test_an_executor_of_another_version_is_refused_before_anything_is_unpickled() -> None:
    answer = pickle.loads(jobs._call("0.0.1", b"of another version", b"likewise"))
    assert answer.error.code == "executor_version"
    assert "0.0.1" in answer.error.message


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.12", "executor_version"),
        ("ModuleNotFoundError: No module named 'millstream'", "executor_version"),
        ("Job aborted due to stage failure", "engine"),
    ],
)
def test_what_executors_lack_has_a_code(text: str, code: str) -> None:
    found = translated(Py4JError(text), "read the log")
    assert isinstance(found, EngineError)
    assert found.code == code
    assert found.hint


def test_errors_that_have_a_code_keep_it() -> None:
    error: MillstreamError = LakeUnavailable("refused", code="lake_credentials")
    assert translated(error, "") is error
