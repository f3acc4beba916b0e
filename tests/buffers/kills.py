"""Kill a server under load: every operation that it acknowledged is found, exactly once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from millstream.errors import BufferOutcomeUnknown, BufferUnavailable, MillstreamError
from millstream.model.ids import ShardId
from millstream.ports import WriteBuffer
from millstream.testing.write_buffer import application_op, next_op, texts_of

WRITERS = 4


def survive(buffer: WriteBuffer, kill: Callable[[], None], restart: Callable[[], None], *, rounds: int) -> None:
    """Write from several threads while the server is killed and restarted; then read both shards.

    Args:
        buffer: a buffer of two shards.
        kill: kills the server by SIGKILL.
        restart: starts the server again on its data.
        rounds: number of kills.
    """
    acknowledged: dict[str, tuple[ShardId, int]] = {}
    unknown: set[str] = set()
    refused: list[MillstreamError] = []
    stop = threading.Event()

    def write(writer: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            text, shard = f"{writer}.{number}", ShardId(number % 2)
            try:
                meta = buffer.append(shard, application_op(texts=[text]))
                acknowledged[text] = (shard, int(meta.offset))
            except BufferOutcomeUnknown:
                unknown.add(text)
            except BufferUnavailable:
                continue  # the operation wasn't stored: if it is found below, the test fails
            except MillstreamError as error:
                refused.append(error)
                return

    def wait_for_more() -> None:
        goal = len(acknowledged) + 100
        _until(lambda: len(acknowledged) >= goal or refused)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(WRITERS)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(rounds):
            wait_for_more()
            kill()
            restart()
        wait_for_more()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not refused
    found: dict[str, list[tuple[ShardId, int]]] = {}
    for shard in buffer.shards():
        reader = buffer.reader(shard)
        end = reader.end_offset()
        while reader.place < end:
            item = next_op(reader)
            found.setdefault(texts_of(item)[0], []).append((shard, int(item.meta.offset)))
    assert {text: [place] for text, place in acknowledged.items()} == {
        text: places for text, places in found.items() if text in acknowledged
    }
    others = set(found) - set(acknowledged)
    assert others <= unknown
    assert all(len(found[text]) == 1 for text in others)


def _until(condition: Callable[[], object], within_s: float = 300.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
