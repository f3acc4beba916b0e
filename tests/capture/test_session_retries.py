"""The waits between the sessions of capture: what is tried again, for how long, and what makes the waits short again."""

from __future__ import annotations

import pytest

from millstream.capture.connection import translate_fields
from millstream.capture.session_retries import SessionRetries
from millstream.errors import DiskFull, MillstreamError, SourceError

BROKEN = SourceError("the connection broke", code="source_unreachable")
BUSY = SourceError("the slot is in use", code="slot_active")
FULL = DiskFull("no space")


def wait_s(retries: SessionRetries, error: MillstreamError, *, connected_s: float | None = None) -> float:
    found = retries.wait_s(error, connected_s=connected_s, ever_connected=True)
    assert found is not None
    return found


def test_waits_grow_to_ten_seconds_and_begin_again_after_a_connection() -> None:
    retries = SessionRetries(None)
    first = wait_s(retries, BROKEN)
    assert [wait_s(retries, BROKEN) for _ in range(12)][-1] > 4 * first
    assert wait_s(retries, BROKEN, connected_s=1.0) < 1.0


def test_a_session_that_ends_at_its_first_record_on_a_full_disk_is_no_progress() -> None:
    retries = SessionRetries(None)
    waits = [wait_s(retries, FULL, connected_s=0.1) for _ in range(12)]
    assert waits[-1] > 4 * waits[0]
    assert wait_s(retries, FULL, connected_s=60.0) < 1.0, "the disk had room for a minute"


def test_a_slot_in_use_is_asked_for_every_two_seconds() -> None:
    retries = SessionRetries(None)
    assert max(wait_s(retries, BUSY) for _ in range(12)) <= 2.0


@pytest.mark.parametrize("error", [BROKEN, BUSY, FULL])
def test_a_source_that_was_never_reached_is_tried_again_only_if_its_address_is_right(error: MillstreamError) -> None:
    found = SessionRetries(None).wait_s(error, connected_s=None, ever_connected=False)
    assert (found is None) == (error is BROKEN)


@pytest.mark.parametrize("error", [BROKEN, BUSY, FULL])
def test_failures_without_an_end_are_given_up_after_their_time(error: MillstreamError) -> None:
    assert SessionRetries(0.0).wait_s(error, connected_s=None, ever_connected=True) is None
    assert SessionRetries(60.0).wait_s(error, connected_s=None, ever_connected=True) is not None


def test_an_error_that_no_wait_mends_is_not_tried_again() -> None:
    refused = SourceError("the slot is lost", code="slot_lost")
    assert SessionRetries(None).wait_s(refused, connected_s=5.0, ever_connected=True) is None


def test_a_deadlock_with_the_source_s_own_sessions_is_tried_again() -> None:
    """A look that a DROP of a partition ran into ended capture."""
    error = translate_fields("40P01", "deadlock detected")
    assert error.code == "source_deadlock"
    assert SessionRetries(None).wait_s(error, connected_s=0.1, ever_connected=True) is not None


def test_a_partition_that_is_dropped_during_a_statement_is_no_reason_to_end() -> None:
    """PostgreSQL opens each published partition to list a publication's tables."""
    error = translate_fields("XX000", "could not open relation with OID 16401")
    assert error.code == "source_relation_gone"
    assert SessionRetries(None).wait_s(error, connected_s=0.1, ever_connected=True) is not None
    assert translate_fields("XX000", "unexpected chunk number 1").code == "source"
