"""A failure of one table quarantines it; a failure that all tables share ends the batch."""

from __future__ import annotations

import pytest

from millstream.errors import DiskFull, EngineError, LakeUnavailable, Retry
from millstream.spark.executor_tasks import TableError
from millstream.spark.quarantine import failure_of_lake

DAMAGED = TableError("lake_table_invalid", "a table is damaged", "", Retry.OPERATOR)
DISK_FULL = TableError.of(DiskFull("the disk is full"))
UNREACHABLE = TableError("lake_unavailable", "no route", "", Retry.BACKOFF)
NO_KEYS = TableError("lake_credentials", "the keys are refused", "", Retry.OPERATOR)


def test_a_table_that_fails_on_its_own_is_quarantined_even_if_no_other_landed() -> None:
    assert failure_of_lake([], landed_tables=0) is None
    assert failure_of_lake([DAMAGED], landed_tables=0) is None
    assert failure_of_lake([DAMAGED, DISK_FULL], landed_tables=0) is None
    assert failure_of_lake([DISK_FULL, UNREACHABLE], landed_tables=1) is None


def test_temporary_failures_of_all_tables_end_the_batch() -> None:
    failure = failure_of_lake([DISK_FULL, DISK_FULL], landed_tables=0)
    assert isinstance(failure, EngineError)
    assert failure.details["cause"] == "disk_full"
    assert "the disk is full" in failure.message


@pytest.mark.parametrize("landed_tables", [0, 3])
def test_refused_keys_end_the_batch_although_other_tables_landed(landed_tables: int) -> None:
    failure = failure_of_lake([DAMAGED, NO_KEYS], landed_tables=landed_tables)
    assert isinstance(failure, LakeUnavailable)
    assert failure.code == "lake_credentials"
