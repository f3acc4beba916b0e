"""A row goes to the first matching rule, else its table's shard, else the ring, else an error; order is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.routing.rows import batch_of, ops_of, schema_of, shards

from millstream.errors import IngestError, RoutingError, UsageError
from millstream.model.ids import ShardId
from millstream.model.operations import TableRows
from millstream.model.positions import Offset, Seq
from millstream.routing.hashing import key_hashes
from millstream.routing.partitions import PartitionTemplate
from millstream.routing.router import Router, in_key_order
from millstream.routing.rules import (
    HashRing,
    Matcher,
    RoutingConfig,
    RoutingRules,
    RuleTarget,
    ShardConfig,
    SpecificTarget,
)
from millstream.routing.shard_map import ShardMap
from millstream.testing.errors import coded
from millstream.wal.writing.record_numbering import plan_group

KEYED = schema_of({"id": pa.int64(), "kind": pa.string(), "day": pa.string(), "n": pa.int64()}, key=("id",))
PLAIN = schema_of({"id": pa.int64(), "kind": pa.string(), "day": pa.string(), "n": pa.int64()})


def rule(table: str, to: str | Sequence[str], where: str | None = None) -> SpecificTarget:
    return SpecificTarget(Matcher.parse(table, where), RuleTarget.parse(*([to] if isinstance(to, str) else to)))


def router(
    rules: RoutingRules | None, *, count: int = 4, own: int | None = None, partitions: str | None = None, era: int = 1
) -> Router:
    return Router(
        rules,
        shard_of_table=lambda _: None if own is None else ShardId(own),
        partitions={} if partitions is None else {"public.clicks": PartitionTemplate.parse(partitions)},
        ring=ShardMap.ring(shards(count)),
        era=era,
    )


def rows_of(
    ids: Sequence[int | None],
    kinds: Sequence[str] | None = None,
    days: Sequence[str] | None = None,
    operations: Sequence[int] | None = None,
    schema: Any = KEYED,
) -> pa.RecordBatch:
    count = len(ids)
    columns = {"id": ids, "kind": kinds or ["k"] * count, "day": days or ["d"] * count, "n": list(range(count))}
    return batch_of(schema, columns, operations)


def where(entries: Sequence[TableRows]) -> dict[int, tuple[Any, ...]]:
    """By `n`: the entry's index, shard, partition and sink."""
    found = {}
    for place, entry in enumerate(entries):
        sink = entry.sink
        for n in entry.rows.column("n").to_pylist():
            assert n not in found or sink is not None
            found[n] = (place, int(entry.shard), entry.partition, sink)
    return found


RING = ShardConfig((), HashRing())


def test_the_first_rule_that_matches_takes_a_row() -> None:
    rules = ShardConfig(
        (
            rule(r"other\..*", "shard:9"),
            rule(r".*\.clicks", "devnull", "kind = 'bot'"),
            rule(r"public\.clicks", "shard:3", "id > 10"),
            rule(".*", "shard:1"),
        ),
    )
    rows = rows_of([1, 2, 11, 12], ["bot", "man", "bot", "man"])
    sent: list[tuple[str, int]] = []
    asked = Router(rules, shard_of_table=lambda _: None, count=lambda *one: sent.append(one))
    found = where(asked.place(KEYED, rows))
    assert {n: place[1] for n, place in found.items()} == {1: 1, 3: 3}
    assert sent == [("devnull", 2)]


def test_a_table_must_match_whole() -> None:
    with pytest.raises(RoutingError, check=coded("no_route_matches")):
        router(ShardConfig((rule("clicks", "shard:1"),))).place(KEYED, rows_of([1]))


def test_what_no_rule_takes_goes_to_the_tables_shard_then_the_ring_then_nowhere() -> None:
    some = ShardConfig((rule(".*", "shard:0", "id = 1"),), HashRing())
    rows = rows_of([1, 2])
    assert where(router(some, own=2).place(PLAIN, rows))[1][1] == 2
    by_ring = int(ShardMap.ring(shards(4)).shards_of(key_hashes([pa.array([2])]))[0])
    only_key = ShardConfig((rule(".*", "devnull", "id = 1"),), HashRing())
    assert where(router(only_key).place(KEYED, rows))[1][1] == by_ring
    with pytest.raises(RoutingError, check=coded("no_route_matches"), match="1 of 2 rows") as caught:
        router(ShardConfig((rule(".*", "shard:0", "id = 1"),))).place(PLAIN, rows)
    assert caught.value.details == {"table": "public.clicks", "row": 1, "rows": 1}
    with pytest.raises(RoutingError, check=coded("no_route_matches"), match="no key") as without:
        router(RING).place(PLAIN, rows)
    assert "columns_of" in without.value.hint


def test_without_rules_a_table_lies_whole_on_its_shard() -> None:
    rows = rows_of([1, 2, 3])
    (entry,) = router(None, own=2, era=0).place(KEYED, rows)
    assert (entry.shard, entry.rows.equals(rows), entry.partition, entry.era) == (2, True, None, 0)


def test_everything_may_go_to_one_place() -> None:
    (entry,) = router(RoutingConfig(RuleTarget.parse("shard:2"))).place(PLAIN, rows_of([1, 2]))
    assert entry.shard == 2
    assert router(RoutingConfig(RuleTarget.parse("devnull"))).place(PLAIN, rows_of([1, 2])) == ()


IDS = st.lists(st.none() | st.integers(-5, 20), min_size=1, max_size=60)


@given(IDS, st.integers(1, 6), st.data())
def test_rows_of_one_key_lie_on_one_shard_in_their_order(
    ids: list[int | None], count: int, data: st.DataObject
) -> None:
    days = data.draw(st.lists(st.sampled_from("abc"), min_size=len(ids), max_size=len(ids)))
    entries = router(RING, count=count, partitions="{day}").place(KEYED, rows_of(ids, days=days))
    found = where(entries)
    assert sorted(found) == list(range(len(ids)))
    shard_of: dict[int | None, int] = {}
    for n, key in enumerate(ids):
        assert found[n][2] == days[n]
        assert shard_of.setdefault(key, found[n][1]) == found[n][1]
    for entry in entries:
        own = entry.rows.column("n").to_pylist()
        assert own == sorted(own)
        assert entry.era == 1
    # Numbers follow the entries: a key's rows must have rising ones, whatever their partitions.
    by_key: dict[int | None, list[int]] = {}
    for n, key in enumerate(ids):
        by_key.setdefault(key, []).append(found[n][0])
    assert all(places == sorted(places) for places in by_key.values())


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.randoms(use_true_random=False)),
        min_size=1,
        max_size=6,
    )
)
def test_numbers_in_the_log_keep_each_keys_order_over_partitions_and_operations(
    requests: list[tuple[list[int], Any]],
) -> None:
    """Several requests in one commit group: each key's rows have rising numbers in the order in which they came."""
    asked = router(RING, count=3, partitions="{day}")
    group, expected, n = [], {}, 0
    for ids, chance in requests:
        days = [chance.choice("abc") for _ in ids]
        columns = {"id": ids, "kind": ["k"] * len(ids), "day": days, "n": list(range(n, n + len(ids)))}
        for key in ids:
            expected.setdefault(key, []).append(n)
            n += 1
        group.append(ops_of(asked.place(KEYED, batch_of(KEYED, columns))))
    plans = plan_group(group, first_seq=Seq(1), base=dict.fromkeys(shards(3), Offset(0)), frame_bytes_max=1 << 20)
    numbers = {}
    for frames in plans.values():
        for frame in frames:
            firsts = frame.batches.column("first_seq").to_pylist()
            counts = frame.batches.column("count").to_pylist()
            seqs = [first + k for first, count in zip(firsts, counts, strict=True) for k in range(count)]
            ((_, rows),) = frame.payload
            numbers |= dict(zip(rows.column("n").to_pylist(), seqs, strict=True))
    assert sorted(numbers.values()) == list(range(1, n + 1))
    for ns in expected.values():
        seqs = [numbers[one] for one in ns]
        assert seqs == sorted(seqs)


def test_sinks_get_their_rows_beside_the_log() -> None:
    rules = ShardConfig((rule(".*", ["ring", "copies", "audit"], "id < 3"), rule(".*", ["ring", "audit"])), HashRing())
    entries = router(rules).place(KEYED, rows_of([1, 2, 3, 4]))
    sinks = {e.sink: e.rows.column("n").to_pylist() for e in entries if e.sink is not None}
    assert sinks == {"copies": [0, 1], "audit": [0, 1, 2, 3]}
    assert sorted(n for e in entries if e.sink is None for n in e.rows.column("n").to_pylist()) == [
        0,
        1,
        2,
        3,
    ]


def test_rows_that_stay_have_indexes_without_gaps_in_each_operation() -> None:
    rules = ShardConfig((rule(".*", "devnull", "kind = 'bot'"), rule(".*", "shard:0")))
    rows = rows_of([1, 2, 3, 4, 5], ["bot", "man", "man", "bot", "man"], operations=[0, 0, 0, 2, 2])
    (entry,) = router(rules).place(KEYED, rows)
    assert entry.rows.column("__operation").to_pylist() == [0, 0, 2]
    assert entry.rows.column("__index").to_pylist() == [0, 1, 0]


@given(IDS, st.integers(1, 5), st.integers(1, 5))
def test_placed_anew_is_as_if_placed_then(ids: list[int | None], before: int, after: int) -> None:
    old = router(RING, count=before, partitions="{day}")
    new = old.with_ring(ShardMap.ring(shards(after)), era=2)
    rows = rows_of(ids, days=["xy"[n % 2] for n in range(len(ids))])
    anew = new.place_anew(ops_of(old.place(KEYED, rows)))
    straight = new.place(KEYED, rows)
    assert [(e.shard, e.partition, e.era) for e in anew.tables] == [(e.shard, e.partition, 2) for e in straight]
    assert all(a.rows.equals(b.rows) for a, b in zip(anew.tables, straight, strict=True))


@given(IDS, st.integers(1, 4))
def test_placed_anew_rows_stay_in_partitions_that_others_made(ids: list[int | None], after: int) -> None:
    """Rows as a write buffer's operations have them, unknown to this home's configuration."""
    made = router(RING, count=3, partitions="{day}").place(
        KEYED, rows_of(ids, days=["xy"[n * n % 3 % 2] for n in range(len(ids))])
    )
    new = router(RING, count=3).with_ring(ShardMap.ring(shards(after)), era=2)
    straight = router(RING, count=3, partitions="{day}").with_ring(ShardMap.ring(shards(after)), era=2)
    found, wanted = (one.place_anew(ops_of(made)).tables for one in (new, straight))
    of_keys: list[dict[int | None, list[tuple[int, int, str | None, int]]]] = []
    for entries in (found, wanted):
        of_keys.append({})
        for entry in entries:
            for row in entry.rows.to_pylist():
                told = (row["__operation"], row["__index"], entry.partition, int(entry.shard))
                of_keys[-1].setdefault(row["id"], []).append(told)
    assert of_keys[0] == of_keys[1]


def test_a_ring_over_other_columns_than_the_keys_is_refused() -> None:
    with pytest.raises(RoutingError, check=coded("invalid_route"), match="several shards"):
        router(ShardConfig((), HashRing(("kind",)))).place(KEYED, rows_of([1]))
    assert router(ShardConfig((), HashRing(("kind",)))).place(PLAIN, rows_of([1]))
    of_table = HashRing(("kind",), {"public.clicks": ("id",)})
    assert router(ShardConfig((), of_table)).place(KEYED, rows_of([1]))


def test_a_predicate_that_would_part_a_key_over_shards_is_refused() -> None:
    with pytest.raises(RoutingError, check=coded("invalid_route"), match="one key would lie on several shards"):
        router(ShardConfig((rule(".*", "shard:1", "kind = 'x'"),), HashRing())).place(KEYED, rows_of([1]))
    for fine in (
        rule(".*", "shard:1", "id = 1"),
        rule(".*", "devnull", "kind = 'x'"),
        rule(".*", ["ring", "copies"], "kind = 'x'"),
    ):
        assert router(ShardConfig((fine,), HashRing())).place(KEYED, rows_of([1]))
    # Without a key, no rows have to stay together.
    assert router(ShardConfig((rule(".*", "shard:1", "kind = 'x'"),), HashRing(("kind",)))).place(PLAIN, rows_of([1]))


@pytest.mark.parametrize(("columns", "match"), [(("nothing",), "no column nothing"), (("tags",), "can't spread")])
def test_a_ring_over_columns_that_dont_do_is_refused(columns: tuple[str, ...], match: str) -> None:
    schema = schema_of({"id": pa.int64(), "tags": pa.list_(pa.string())})
    with pytest.raises(RoutingError, check=coded("invalid_route"), match=match):
        router(ShardConfig((), HashRing(columns))).place(schema, batch_of(schema, {"id": [1], "tags": [["a"]]}))


def test_a_captured_table_is_never_routed() -> None:
    captured = schema_of({"id": pa.int64()}, source=1)
    with pytest.raises(IngestError, check=coded("table_captured"), match="whole on one shard"):
        router(RING).place(captured, batch_of(captured, {"id": [1]}))


def test_rows_in_too_many_places_are_refused() -> None:
    rows = rows_of([1] * 6000, days=["ab"[n % 2] for n in range(6000)])
    with pytest.raises(RoutingError, check=coded("invalid_route"), match="4096"):
        router(RING, partitions="{day}").place(KEYED, rows)


@pytest.mark.parametrize(
    "words",
    [[], ["shard:1", "shard:2"], ["shard:1", "ring"], ["shard:x"], ["shard:-1"], ["devnull", "shard:1"], ["a", "a"]],
)
def test_targets_that_make_no_sense_are_refused(words: list[str]) -> None:
    with pytest.raises(UsageError):
        RuleTarget.parse(*words)


def test_a_rule_that_is_no_regular_expression_is_refused() -> None:
    with pytest.raises(UsageError, match="regular expression"):
        Matcher.parse("(")


def test_it_says_what_takes_a_row_and_what_might() -> None:
    rules = ShardConfig(
        (rule("nothing", "shard:9"), rule(".*", "devnull", "kind = 'bot'"), rule(".*", "shard:1", "id = 7")), HashRing()
    )
    asked = router(rules)
    assert [(c.number, str(c.target)) for c in asked.explain(KEYED)] == [(2, "devnull"), (3, "shard:1"), (None, "ring")]
    (bot,) = asked.explain(KEYED, rows_of([7], ["bot"]))
    assert (bot.number, bot.where) == (2, "kind = 'bot'")
    (other,) = asked.explain(KEYED, rows_of([8]))
    assert (other.number, other.why) == (None, "no rule takes it: the hash ring over id")


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.sampled_from("ab")), min_size=1, max_size=6), min_size=1, max_size=5
    )
)
def test_requests_in_one_batch_have_as_many_entries_as_the_one_that_needs_most(
    requests: list[list[tuple[int, str]]],
) -> None:
    """A key whose partition changes from request to request needs no entry: numbers go request by request."""
    asked = router(RING, count=1, partitions="{day}")
    ids = [key for request in requests for key, _ in request]
    days = [day for request in requests for _, day in request]
    operations = [number for number, request in enumerate(requests) for _ in request]
    entries = asked.place(KEYED, rows_of(ids, days=days, operations=operations))
    alone = [
        len(asked.place(KEYED, rows_of([key for key, _ in request], days=[day for _, day in request])))
        for request in requests
    ]
    assert len(entries) <= 2 * max(alone)
    assert [(e.partition, e.rows.to_pylist()) for e in in_key_order(list(merged(entries)))] == [
        (e.partition, e.rows.to_pylist()) for e in entries
    ]


def merged(entries: Sequence[TableRows]) -> list[TableRows]:
    """One entry for each shard and partition, as an export has them."""
    of_place: dict[Any, list[TableRows]] = {}
    for entry in sorted(entries, key=lambda entry: (int(entry.shard), entry.partition or "")):
        of_place.setdefault((entry.shard, entry.partition), []).append(entry)
    found = []
    for alike in of_place.values():
        rows = pa.Table.from_batches([entry.rows for entry in alike])
        by = [("__operation", "ascending"), ("__index", "ascending")]
        (whole,) = rows.sort_by(by).combine_chunks().to_batches()
        found.append(TableRows(alike[0].schema, whole, alike[0].shard, alike[0].partition, alike[0].era))
    return found
