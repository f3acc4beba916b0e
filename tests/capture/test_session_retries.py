"""The waits between the sessions of capture: what is tried again, for how long, and what makes the waits short again."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.capture.connection import translate_fields
from millstream.capture.session_retries import SessionRetries
from millstream.errors import DiskFull, MillstreamError, SourceError
from millstream.model.positions import Lsn

BROKEN = SourceError("the connection broke", code="source_unreachable")
BUSY = SourceError("the slot is in use", code="slot_active")
FULL = DiskFull("no space")


def wait_s(retries: SessionRetries, error: MillstreamError) -> float:
    found = retries.wait_s(error, ever_connected=True)
    assert found is not None
    return found


def after_session(
    retries: SessionRetries, error: MillstreamError, *, lasted_s: float = 0.1, records: int = 0, durable: int = 100
) -> float:
    """Return the wait after a session that had begun to stream."""
    retries.note_session(lasted_s=lasted_s, records=records, durable=Lsn(durable))
    return wait_s(retries, error)


@pytest.mark.parametrize("progress", [{"records": 1}, {"durable": 101}, {"lasted_s": 10.0}])
def test_waits_grow_to_ten_seconds_and_begin_again_after_a_session_with_progress(progress: dict[str, Any]) -> None:
    """A source that broke each session right after it had connected was asked five times a second, for ever."""
    retries = SessionRetries(None)
    waits = [after_session(retries, BROKEN) for _ in range(12)]
    assert waits[-1] > 4.0
    assert wait_s(retries, BROKEN) > 4.0
    assert after_session(retries, BROKEN, **progress) < 1.0
    assert [after_session(retries, BROKEN) for _ in range(12)][-1] > 4.0, "later sessions had no progress"


def test_sessions_without_progress_are_given_up_after_their_time() -> None:
    retries = SessionRetries(0.0)
    retries.note_session(lasted_s=0.1, records=0, durable=Lsn(100))
    assert retries.wait_s(BROKEN, ever_connected=True) is None


def test_a_session_that_ends_at_the_record_without_room_on_a_full_disk_is_no_progress() -> None:
    retries = SessionRetries(None)
    waits = [after_session(retries, FULL, durable=100 + n) for n in range(12)]
    assert waits[-1] > 4 * waits[0]
    assert after_session(retries, FULL, lasted_s=60.0) < 1.0, "the disk had room for a minute"


def test_a_slot_in_use_is_asked_for_every_two_seconds() -> None:
    retries = SessionRetries(None)
    assert max(wait_s(retries, BUSY) for _ in range(12)) <= 2.0


@pytest.mark.parametrize("error", [BROKEN, BUSY, FULL])
def test_a_source_that_was_never_reached_is_tried_again_only_if_its_address_is_right(error: MillstreamError) -> None:
    found = SessionRetries(None).wait_s(error, ever_connected=False)
    assert (found is None) == (error is BROKEN)


@pytest.mark.parametrize("error", [BROKEN, BUSY, FULL])
def test_failures_without_an_end_are_given_up_after_their_time(error: MillstreamError) -> None:
    assert SessionRetries(0.0).wait_s(error, ever_connected=True) is None
    assert SessionRetries(60.0).wait_s(error, ever_connected=True) is not None


def test_an_error_that_no_wait_mends_is_not_tried_again() -> None:
    refused = SourceError("the slot is lost", code="slot_lost")
    assert SessionRetries(None).wait_s(refused, ever_connected=True) is None


def test_a_deadlock_with_the_source_s_own_sessions_is_tried_again() -> None:
    """A look that a DROP of a partition ran into ended capture."""
    error = translate_fields("40P01", "deadlock detected")
    assert error.code == "source_deadlock"
    assert SessionRetries(None).wait_s(error, ever_connected=True) is not None


def test_a_partition_that_is_dropped_during_a_statement_is_no_reason_to_end() -> None:
    """PostgreSQL opens each published partition to list a publication's tables."""
    error = translate_fields("XX000", "could not open relation with OID 16401")
    assert error.code == "source_relation_gone"
    assert SessionRetries(None).wait_s(error, ever_connected=True) is not None
    assert translate_fields("XX000", "unexpected chunk number 1").code == "source"
