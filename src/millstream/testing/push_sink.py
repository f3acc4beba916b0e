"""The requirements for every push sink: one suite for all of them.

Subclass it in a test module and provide a receiver, and its possible faults:

    class TestOurs(PushSinkConformance):
        @pytest.fixture
        def stage(self):
            return OurStage()  # a SinkStage

The suite uses only a sink's port (`millstream.delivery.sinks.PushSink`) and this stage.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from millstream.delivery.sinks import ACCEPTED, PushMessage, PushSink, Verdict

__all__ = ["PushSinkConformance", "SinkStage", "push_message"]


class SinkStage(Protocol):
    """A receiver for one test."""

    def open(self) -> PushSink:
        """Return a new sink for this receiver; the stage closes it. It takes batches of 10 messages."""

    def received(self) -> Sequence[tuple[str, Any]]:
        """Return the id and the decoded record of each message that arrived, in the order of arrival."""

    def break_down(self) -> None:
        """Let the receiver refuse or lose what comes from now on."""

    def mend(self) -> None:
        """Let the receiver work again."""


def push_message(
    number: int, *, table: str | None = "public.orders", op: str = "c", text: str = "", deliveries: int = 1
) -> PushMessage:
    """Return a message of a record as the log has it, of group `g0`, `g1` or `g2`."""
    record = {
        "stream": "shop",
        "shard": 0,
        "epoch": 1,
        "offset": number,
        "seq": number + 1,
        "op": op,
        "table": table,
        "row": {"id": number, "text": text},
        "before": None,
    }
    group = None if table is None else f"g{number % 3}"
    return PushMessage(
        f"shop-0-1-{number}", group, deliveries, json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
    )


class PushSinkConformance:
    """Subclass it: see the module."""

    def test_messages_arrive_whole_and_in_order(self, stage: SinkStage) -> None:
        """A batch is acknowledged once its messages have arrived."""
        sink = stage.open()
        expected = []
        for start in range(0, 50, 10):
            batch = [push_message(number) for number in range(start, start + 10)]
            assert sink.deliver(batch) == ACCEPTED
            expected += _pairs(batch)
            assert list(stage.received()) == expected

    def test_any_text_arrives(self, stage: SinkStage) -> None:
        """Line ends, quotes, all planes of Unicode, and much text."""
        texts = ["a\nb\r\nc\u2028d\u0085e", 'quoted "\\" {}', "é漢🦫\u0000\u007f", "", "x" * (2 << 20)]
        batch = [push_message(number, text=text) for number, text in enumerate(texts)]
        assert stage.open().deliver(batch) == ACCEPTED
        assert list(stage.received()) == _pairs(batch)

    def test_every_kind_of_record_arrives(self, stage: SinkStage) -> None:
        """Tables with any name, a truncate, a partition that left, and a logical message, which has no table."""
        batch = [
            push_message(0, table='"My schema"."T.1"', op="u"),
            push_message(1, op="t"),
            push_message(2, table=None, op="m"),
            push_message(3, op="d"),
            push_message(4, op="x"),
        ]
        assert stage.open().deliver(batch) == ACCEPTED
        assert sorted(stage.received(), key=_id) == _pairs(batch)

    def test_a_failure_is_an_outcome_and_the_sink_works_on_once_the_receiver_does(self, stage: SinkStage) -> None:
        """The same messages arrive under the same ids, however often they are sent."""
        sink = stage.open()
        assert sink.deliver([push_message(0)]) == ACCEPTED
        stage.break_down()
        for deliveries in (1, 2):
            outcome = sink.deliver([push_message(number, deliveries=deliveries) for number in (1, 2)])
            assert outcome.verdict is Verdict.FAILED
            assert outcome.reason
        stage.mend()
        batch = [push_message(number, deliveries=3) for number in (1, 2)]
        assert sink.deliver(batch) == ACCEPTED
        assert list(stage.received())[-2:] == _pairs(batch)

    def test_a_batch_may_be_repeated(self, stage: SinkStage) -> None:
        """An acknowledgement may be lost, also with the process: another sink then sends the batch again."""
        batch = [push_message(0), push_message(1)]
        assert stage.open().deliver(batch) == ACCEPTED
        assert stage.open().deliver(batch) == ACCEPTED
        assert list(stage.received()) == 2 * _pairs(batch)

    def test_as_many_batches_as_it_allows_go_out_at_once(self, stage: SinkStage) -> None:
        """Each keeps its own order."""
        sink = stage.open()
        count = sink.pacing.concurrency
        batches = [[push_message(100 * part + number) for number in range(10)] for part in range(count)]
        with ThreadPoolExecutor(count) as pool:
            assert list(pool.map(sink.deliver, batches)) == [ACCEPTED] * count
        received = list(stage.received())
        for batch in batches:
            ids = {message.id for message in batch}
            assert [pair for pair in received if pair[0] in ids] == _pairs(batch)

    def test_its_pacing_is_usable(self, stage: SinkStage) -> None:
        """Batches have messages, and waits don't shrink."""
        pacing = stage.open().pacing
        assert pacing.batch_size >= 1
        assert pacing.concurrency >= 1
        assert 0 < pacing.retry_min_s <= pacing.retry_max_s

    def test_it_may_be_closed_twice(self, stage: SinkStage) -> None:
        """Whether it was used or not."""
        unused, used = stage.open(), stage.open()
        assert used.deliver([push_message(0)]) == ACCEPTED
        for sink in (unused, used, unused, used):
            sink.close()


def _pairs(messages: Sequence[PushMessage]) -> list[tuple[str, Any]]:
    return [(message.id, json.loads(message.record)) for message in messages]


def _id(pair: tuple[str, Any]) -> str:
    return pair[0]
