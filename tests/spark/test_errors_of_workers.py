"""Errors of Spark's Python processes arrive as text, and become the original errors again."""

from __future__ import annotations

import traceback

import pytest

from millstream.errors import LakeConflict, LogTruncated, MillstreamError, OffsetExpired
from millstream.spark.driver import _typed


@pytest.mark.parametrize("kind", [LogTruncated, LakeConflict, OffsetExpired])
def test_an_error_of_ours_is_one_again_whatever_module_it_lives_in(kind: type[MillstreamError]) -> None:
    try:
        raise kind("it was so")
    except MillstreamError as error:
        text = f"Job aborted.\n{''.join(traceback.format_exception(error))}\n\tat org.apache.spark"
    found = _typed(text)
    assert type(found) is kind
    assert found.message == "it was so"


def test_other_errors_are_none_of_ours() -> None:
    assert _typed("ValueError: millstream.errors is a module") is None
