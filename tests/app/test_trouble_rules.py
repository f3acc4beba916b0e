"""The rules: each condition is found when it is there, and not before its time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.app.alerts.statuses import consumer, well

from millstream.app.alerts.observations import Observations
from millstream.app.trouble_rules import Bounds, Condition, facts_of, judge
from millstream.config.alerts_model import AlertsConfig

BOUNDS = Bounds.of(AlertsConfig(no_records_after="2h"))
"""Ten minutes without progress, and 4 GiB of WAL."""
EVERY_S = 15.0
Step = Callable[[int], dict[str, Any]]


def watched(status_at: Step, minutes: int, seen: Observations | None = None) -> list[Condition]:
    """Look every quarter of a minute, for so many minutes; return the conditions of the last look."""
    seen = seen or Observations(EVERY_S)
    found: list[Condition] = []
    for look in range(minutes * 4 + 1):
        status, now_s = status_at(look), 1000.0 + look * EVERY_S
        seen.observe(facts_of(status, seen), now_s)
        found = judge(status, seen, BOUNDS, now_s)
    return found


def kinds(found: list[Condition]) -> list[str]:
    return [str(condition.kind) for condition in found]


def alerted(found: list[Condition]) -> list[str]:
    """Return the kinds of those that alerts are sent about."""
    return kinds([condition for condition in found if condition.is_alert])


def node(**facts: Any) -> dict[str, Any]:
    """Return a node's part in the stream: it follows another one, with a process."""
    return {
        "stream": "shop",
        "role": "follows",
        "leader": "b",
        "following": {"error": None},
        "followers": [],
        "too_few_followers": False,
        "other_streams": {},
        "error": None,
    } | facts


def test_a_stream_that_does_well_has_no_condition() -> None:
    assert watched(lambda _: well(consumers=[consumer()]), 60) == []


def test_a_slot_that_holds_more_than_the_bound_is_reported() -> None:
    assert kinds(watched(lambda _: well(source={"slot_holds_bytes": 4 << 30}), 0)) == []
    (found,) = watched(lambda _: well(source={"slot_holds_bytes": (4 << 30) + 1}), 0)
    assert (found.kind, found.stream, found.subject) == ("slot_lag", "shop", "millstream_shop")
    assert "4096 MiB" in found.message


def test_a_slot_that_is_not_read_is_reported_in_time_with_what_it_holds() -> None:
    seen = Observations(EVERY_S, slots={"shop": {"is_read": False, "holds": 5 << 30}})
    away = well(source={"mode": None, "slot_holds_bytes": None})
    away["processes"] = {}
    assert kinds(watched(lambda _: away, 9, seen)) == ["slot_lag"]
    seen = Observations(EVERY_S, slots={"shop": {"is_read": False, "holds": 5 << 30}})
    assert kinds(watched(lambda _: away, 10, seen)) == ["slot_lag", "slot_inactive"]
    seen.slots["shop"]["is_read"] = True  # by another process: capture's own error says so
    assert kinds(watched(lambda _: away, 10, seen)) == ["slot_lag"]


def test_a_slot_that_was_dropped_on_purpose_is_shown_and_none_to_alert_about() -> None:
    seen = Observations(EVERY_S, slots={"shop": {"is_read": False, "holds": 5 << 30}})
    away = well(source={"mode": None, "slot_dropped": True})
    away["processes"] = {}
    found = watched(lambda _: away, 20, seen)
    assert (kinds(found), alerted(found)) == (["slot_dropped"], [])
    assert (found[0].subject, found[0].hint) == ("millstream_shop", "Run `millstream run`.")


def test_a_quarantined_table_is_reported_with_what_to_run() -> None:
    table = {"name": "public.orders", "state": "quarantined", "reason": "a value", "hint": ""}
    (found,) = watched(lambda _: well(tables=[table]), 0)
    assert (found.kind, found.subject) == ("table_quarantined", "public.orders")
    assert found.hint == "Mend the cause, then run `millstream tables retry public.orders`."


@pytest.mark.parametrize("part", ["capture", "pipeline"])
def test_a_part_that_gave_up_is_stalled_at_once_and_one_that_retries_in_time(part: str) -> None:
    error = {"code": "source_unreachable", "message": "no route", "hint": "Start it.", "gave_up": False}
    assert watched(lambda _: well(errors={part: error}), 9) == []
    (found,) = watched(lambda _: well(errors={part: error}), 10)
    assert found.kind == f"{part}_stalled"
    assert "no route" in found.message
    assert found.hint == "Start it."
    # A retry that succeeds now and then is progress.
    assert watched(lambda look: well(errors={part: error} if look % 20 else {}), 30) == []
    assert kinds(watched(lambda _: well(errors={part: {**error, "gave_up": True}}), 0)) == [f"{part}_stalled"]


def test_capture_that_never_begins_to_read_is_stalled() -> None:
    assert kinds(watched(lambda _: well(source={"mode": None}), 10)) == ["capture_stalled"]


def test_a_pipeline_that_lands_nothing_while_records_wait_is_stalled() -> None:
    waits = {"lake": {"records": 5}}
    assert watched(lambda _: well(lag=waits), 9) == []
    (found,) = watched(lambda _: well(lag=waits), 10)
    assert found.kind == "pipeline_stalled"
    assert "5 records wait" in found.message
    assert watched(lambda look: well(lag=waits, tokens={"landed": f"7.s{look // 30}"}), 60) == []
    # Without a pipeline, and where none has ever landed anything, none is missed.
    none = well(lag=waits, tokens={"landed": "7.s0"})
    none["processes"]["pipeline"] = None
    assert watched(lambda _: none, 60) == []


def test_a_pipeline_of_run_that_has_never_landed_anything_is_missed_also_while_it_is_down() -> None:
    def dying(look: int) -> dict[str, Any]:
        status = well(lag={"lake": {"records": 5}}, tokens={"landed": "7.s0"})
        status["processes"] |= {"run": 3, "pipeline": None if look % 2 else 2}
        return status

    assert watched(dying, 9) == []
    assert kinds(watched(dying, 10)) == ["pipeline_stalled"]


@pytest.mark.parametrize("part", ["capture", "pipeline"])
def test_a_part_that_gave_up_before_its_stream_s_first_run_is_stalled(part: str) -> None:
    error = {"code": "java_missing", "message": "there is no Java", "hint": "Install one.", "gave_up": True}
    status = well()
    never = {"name": "new", "id": None, "state": "never run", "replication": None, "consumers": [], "regions": []}
    status["streams"].append(never | {"errors": {part: error}})
    (found,) = watched(lambda _: status, 0)
    assert (found.kind, found.stream, found.hint) == (f"{part}_stalled", "new", "Install one.")


def test_a_stream_that_reads_a_buffer_is_stalled_in_time_if_it_can_t() -> None:
    error = {"code": "buffer_unavailable", "message": "no answer", "hint": "Start it.", "gave_up": False}
    fails = well(source={"configured": False, "slot": None, "mode": None}, errors={"capture": error})
    assert watched(lambda _: fails, 9) == []
    assert kinds(watched(lambda _: fails, 10)) == ["capture_stalled"]


def test_a_consumer_that_was_cut_off_and_one_with_dead_letters_are_reported_at_once() -> None:
    cut_off = {"consumer:search": {"kind": "consumer", "first": 4}}  # it may not have noticed so far
    for status in (well(consumers=[consumer(state="cut_off")]), well(log={"cut_off": cut_off}, consumers=[consumer()])):
        (found,) = watched(lambda _, status=status: status, 0)
        assert (found.kind, found.subject) == ("consumer_cut_off", "search")
        assert "consumer rewind search --to earliest --stream shop" in found.hint
    (found,) = watched(lambda _: well(consumers=[consumer(dead=1)]), 0)
    assert (found.kind, found.message) == ("consumer_dead_letters", "consumer search has 1 dead letter")


def test_a_consumer_whose_lag_grows_without_an_ack_is_stalled() -> None:
    def growing(look: int, **changes: Any) -> dict[str, Any]:
        return well(consumers=[consumer(**{"lag": {"records": 1 + look}, **changes})])

    assert watched(growing, 9) == []
    (found,) = watched(growing, 10)
    assert found.kind == "consumer_stalled"
    assert "41 records wait" in found.message
    assert watched(lambda look: growing(look, acked=look // 30), 60) == []
    assert watched(lambda look: growing(look, state="paused"), 60) == []
    (found,) = watched(lambda look: growing(look, error="the receiver answered 500"), 10)
    assert found.message.endswith(": the receiver answered 500")


def test_a_consumer_that_its_receiver_paused_is_stalled() -> None:
    (found,) = watched(lambda _: well(consumers=[consumer(state="paused", error="the receiver answered 410")]), 10)
    assert (found.kind, found.message) == ("consumer_stalled", "consumer search is paused: the receiver answered 410")
    assert "consumer resume search" in found.hint


def test_a_source_that_sends_nothing_of_what_its_wal_has_is_silent() -> None:
    assert watched(lambda _: well(source={"end": "0/20"}), 9) == []
    (found,) = watched(lambda _: well(source={"end": "0/20"}), 10)
    assert (found.kind, found.subject) == ("source_silent", "shop")
    assert watched(lambda look: well(source={"received": f"0/{look}", "end": "0/FFFF"}), 60) == []
    assert watched(lambda _: well(source={"end": "0/20", "mode": "catching up"}), 60) == []


def test_a_stream_without_records_is_silent_if_a_bound_says_so() -> None:
    assert watched(lambda _: well(), 119) == []
    assert kinds(watched(lambda _: well(), 120)) == ["stream_silent"]


def test_a_stream_that_another_node_leads_is_left_to_it() -> None:
    follows = well(source={"slot_holds_bytes": 5 << 30}, consumers=[consumer(dead=1)], replication=node())
    assert watched(lambda _: follows, 20) == []


def test_a_node_that_was_fenced_is_reported_with_its_leader() -> None:
    (found,) = watched(lambda _: well(replication=node(role="fenced", following=None)), 0)
    assert (found.kind, found.subject, found.is_alert) == ("fenced", "shop", True)
    assert found.message == "another node was promoted: writes go to b"
    assert found.hint == "Run `millstream follow b` to follow it."


def test_a_node_that_has_another_stream_of_the_name_is_reported_by_each_leader() -> None:
    leads = node(role="leads", following=None, other_streams={"b": {"message": "b has another", "hint": "Choose one."}})
    (found,) = watched(lambda _: well(replication=leads), 0)
    assert (found.kind, found.subject, found.is_alert) == ("other_stream", "b", True)
    assert (found.message, found.hint) == ("b has another", "Choose one.")


def test_a_node_that_should_follow_and_doesn_t_is_shown_at_once_and_alerted_about_in_time() -> None:
    for apart in (well(replication=node(following=None)), well(regions=[node(stream="shop@2", following=None)])):
        found = watched(lambda _, apart=apart: apart, 9)
        assert (kinds(found), alerted(found)) == (["not_following"], [])
        assert alerted(watched(lambda _, apart=apart: apart, 10)) == ["not_following"]
    assert (
        alerted(watched(lambda look: well(replication=node(following=None if look % 20 else {"error": None})), 30))
        == []
    )


def test_a_follower_that_retention_has_cut_off_is_reported_at_once_by_its_leader() -> None:
    cut_off = {"follower c": {"kind": "follower", "first": 4}}
    leads = node(role="leads", following=None)
    (found,) = watched(lambda _: well(log={"cut_off": cut_off}, replication=leads), 0)
    assert (found.kind, found.subject, found.is_alert) == ("follower_cut_off", "c", True)
    assert found.message == "the follower c was cut off: the log began at 4 then"
    assert "`millstream follow --rebuild`" in found.hint


def follower(**facts: Any) -> dict[str, Any]:
    return {"node": "c", "phase": "apart", "counts": True, "records_behind": None, "cut_off": None} | facts


def test_a_follower_that_is_not_connected_is_shown_and_alerted_about_if_appends_need_it() -> None:
    """It was no trouble at all, even with every append failing."""

    def leading(**facts: Any) -> dict[str, Any]:
        return well(replication=node(role="leads", following=None, followers=[follower()], **facts))

    (found,) = watched(lambda _: leading(), 60)
    assert (found.kind, found.subject, found.is_alert) == ("follower_apart", "c", False)
    assert found.message == "node c doesn't follow this one, and hasn't since the server here started"
    assert "`millstream run` on c" in found.hint
    short = leading(too_few_followers=True, acks="durable(1)")
    assert alerted(watched(lambda _: short, 0)) == []  # the leader may have just started
    (found,) = watched(lambda _: short, 1)
    assert found.is_alert
    assert found.message.endswith(": appends at durable(1) fail until it does")


def test_only_followers_that_should_be_there_are_missed() -> None:
    lacking = follower(records_behind=2)
    for others in ([follower(phase="shipping")], [follower(node="region-2", counts=False)]):
        assert watched(lambda _, others=others: well(replication=node(role="leads", followers=others)), 60) == []
    (found,) = watched(lambda _: well(replication=node(role="leads", followers=[lacking])), 0)
    assert found.message == "node c doesn't follow this one, and lacks 2 records"
    cut_off = {"cut_off": {"follower c": {"kind": "follower", "first": 4}}}
    gone = watched(lambda _: well(replication=node(role="leads", followers=[lacking]), log=cut_off), 0)
    assert kinds(gone) == ["follower_cut_off"]


def test_a_writer_that_readers_wait_for_is_shown_at_once_and_alerted_about_in_time() -> None:
    writer = {"name": "far", "state": "expired", "behind": 3, "location": "/srv/far"}
    found = watched(lambda _: well(writers=[writer]), 9)
    assert (kinds(found), alerted(found)) == (["writer_expired"], [])
    assert found[0].subject == "far"
    assert found[0].hint.endswith("run `millstream writers forget far --stream shop`.")
    assert alerted(watched(lambda _: well(writers=[writer]), 10)) == ["writer_expired"]
    # Another writer recovers its log within seconds, and no reader waits for one that is behind nothing.
    assert alerted(watched(lambda look: well(writers=[writer] if look % 20 else []), 30)) == []
    assert watched(lambda _: well(writers=[{**writer, "behind": 0}]), 20) == []


@pytest.mark.parametrize("part", ["error", "following", "object_store"])
def test_replication_that_fails_is_reported_in_time(part: str) -> None:
    error = {"code": "diverged", "message": "other bytes", "hint": "Run `this`.", "retry": "operator"}
    failing = node(**{part: error if part == "error" else {"error": error}})
    assert watched(lambda _: well(replication=failing), 9) == []
    (found,) = watched(lambda _: well(replication=failing), 10)
    assert (found.kind, found.subject, found.hint) == ("replication_stalled", "shop", "Run `this`.")
    assert found.message == "replication has failed for 10 min: other bytes"
    assert watched(lambda look: well(replication=failing if look % 20 else node()), 30) == []


def test_a_table_that_a_buffer_s_reader_holds_is_reported_with_what_to_run() -> None:
    buffer = {"name": "web-operations", "role": "reads", "shards": {}, "held": {"public.visits": "no rule takes it"}}
    (found,) = watched(lambda _: well(buffer=buffer), 0)
    assert (found.kind, found.subject, found.is_alert) == ("table_held", "public.visits", True)
    assert (
        found.message == "public.visits is held, and the write buffer web-operations keeps its rows: no rule takes it"
    )
    assert found.hint == "Mend the cause, then run `millstream tables retry public.visits`."
    assert watched(lambda _: well(buffer={"name": "out", "role": "writes"}), 0) == []


def test_items_of_a_buffer_that_hold_no_operation_stay_shown_and_are_alerted_about_while_they_come() -> None:
    def left_out(count: int) -> dict[str, Any]:
        shards = {"0": {"undecodable": count}, "1": {"undecodable": 0}}
        return well(buffer={"name": "web-operations", "role": "reads", "shards": shards, "held": {}})

    assert watched(lambda _: left_out(0), 20) == []
    (found,) = watched(lambda _: left_out(2), 9)
    assert (found.kind, found.subject, found.is_alert) == ("buffer_undecodable", "web-operations", True)
    assert "2 items of the write buffer web-operations" in found.message
    assert alerted(watched(lambda _: left_out(2), 10)) == []
    assert kinds(watched(lambda _: left_out(2), 10)) == ["buffer_undecodable"]
    assert alerted(watched(lambda look: left_out(1 + look // 30), 30)) == ["buffer_undecodable"]


def test_a_pipeline_that_run_starts_again_is_shown_until_it_is_stalled() -> None:
    status = well(lag={"lake": {"records": 5}})
    status["processes"] = {"owner": 1, "run": 3, "pipeline": None}
    found = watched(lambda _: status, 9)
    assert (kinds(found), alerted(found), found[0].stream) == (["pipeline_down"], [], "")
    assert alerted(watched(lambda _: status, 10)) == ["pipeline_stalled"]


def test_a_server_whose_address_is_taken_is_shown_at_once_and_alerted_about_later() -> None:
    status = well()
    error = {"code": "address_in_use", "message": "can't listen on :1", "hint": "Set it.", "gave_up": False}
    status["errors"] = {"serve": error}
    found = watched(lambda _: status, 9)
    assert (kinds(found), alerted(found), found[0].hint) == (["server_down"], [], "Set it.")
    assert "can't listen on :1; `millstream run` tries again" in found[0].message
    assert alerted(watched(lambda _: status, 10)) == ["server_down"]
    status["errors"] = {"serve": error | {"gave_up": True}}
    assert alerted(watched(lambda _: status, 1)) == ["server_down"]


def test_a_lake_that_is_tried_again_is_shown_and_not_alerted_about() -> None:
    table = {"name": "public.orders", "state": "streaming", "reason": "lake: tried again: no answer", "hint": ""}
    found = watched(lambda _: well(tables=[table, table]), 20)
    assert (kinds(found), alerted(found)) == (["lake_waits"], [])
    assert found[0].message == "public.orders (and 1 more): lake: tried again: no answer"


def test_a_pause_of_the_whole_home_is_no_stall() -> None:
    seen = Observations(EVERY_S)
    stuck = well(consumers=[consumer(lag={"records": 1})])
    seen.observe(facts_of(stuck, seen), 1000.0)
    seen.observe(facts_of(stuck, seen), 1500.0)  # nothing looked for eight minutes
    assert judge(stuck, seen, BOUNDS, 1500.0) == []
    for look in range(1, 41):
        seen.observe(facts_of(stuck, seen), 1500.0 + look * EVERY_S)
    assert kinds(judge(stuck, seen, BOUNDS, 2100.0)) == ["consumer_stalled"]
    # Observations that are old say nothing about now.
    assert judge(stuck, seen, BOUNDS, 9000.0) == []


def test_a_clock_that_steps_back_makes_no_condition() -> None:
    seen = Observations(EVERY_S)
    stuck = well(consumers=[consumer(lag={"records": 1})])
    for now_s in (5000.0, 1000.0, 1015.0):
        seen.observe(facts_of(stuck, seen), now_s)
        assert judge(stuck, seen, BOUNDS, now_s) == []


def test_observations_come_back_as_they_were() -> None:
    seen = Observations(EVERY_S, slots={"shop": {"is_read": False, "holds": 5}})
    stuck = well(consumers=[consumer(lag={"records": 1})])
    seen.observe(facts_of(stuck, seen), 1000.0)
    again = Observations.from_dict(seen.as_dict(), EVERY_S)
    again.observe(facts_of(stuck, again), 1015.0)
    key = "consumer/shop/search"
    assert again.unchanged_s(key, facts_of(stuck, again)[key], 1015.0) == 15.0
    assert again.slots == seen.slots
