"""The error that a caller gets if its writer doesn't take its request."""

from __future__ import annotations

import asyncio
import fcntl
import json
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from millstream.errors import AppendOutcomeUnknown, MillstreamError, WriterClosed
from millstream.ingest.append_client import AppendClient, AsyncAppendClient, _taken
from millstream.ingest.append_server import AppendServer
from millstream.ingest.socket_protocol import HELLO, LENGTHS
from millstream.model.operations import Appended
from millstream.model.writes import AppendBatch, SessionFacts


@pytest.mark.parametrize("by_task", [True, False])
def test_a_request_that_is_cut_off_by_time_may_be_there(tmp_path: Path, by_task: bool) -> None:
    """Reported as refused, it was sent again, although its last byte might have gone just at the deadline."""
    rows = pa.table({"text": ["x" * 1000] * 10_000})
    path = tmp_path / "w.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(1)

        async def append() -> None:
            loop = asyncio.get_running_loop()
            listening.setblocking(False)
            client, blocking = AsyncAppendClient(path, patience_s=0.2), AppendClient(path, patience_s=0.2)
            request = AppendBatch.of_request({"clicks": rows})
            asked = asyncio.create_task(
                client.append_batch("web", request, deadline_s=0.1)
                if by_task
                else asyncio.to_thread(blocking.append_batch, "web", request, deadline_s=0.1)
            )
            connection, _ = await loop.sock_accept(listening)
            with connection:
                hello = json.dumps(HELLO).encode()
                await loop.sock_sendall(connection, LENGTHS.pack(len(hello), 0) + hello)
                with pytest.raises(AppendOutcomeUnknown):
                    await asked
            client.close()

        asyncio.run(append())


def test_a_writer_that_does_not_answer_is_no_absent_one(tmp_path: Path) -> None:
    """A stopped process was reported as "no writer listens", without a hint."""
    client = AppendClient(tmp_path / "w.sock")
    with pytest.raises(WriterClosed, match="doesn't answer") as raised:
        client.append_batch("web", AppendBatch.of_request({"clicks": pa.table({"id": [1]})}), deadline_s=1)
    assert "millstream status" in raised.value.hint
    client.close()


@pytest.fixture
def many_files() -> Iterator[int]:
    """A descriptor's number that `select` refuses, and which this process may use."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], min(limits[1], 4096)), limits[1]))
    yield 1500
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_connection_is_used_again_in_a_process_of_many_files(tmp_path: Path, many_files: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, many_files)) as idle:
        assert _taken([idle], tmp_path / "w.sock")[0] is idle
        theirs.close()
        with _taken([idle], tmp_path / "w.sock")[0] as other:
            assert other is not idle


class Incarnation:
    """An appender of a log that has so many writes of each session."""

    def __init__(self, writes: int) -> None:
        self._writes = writes

    async def append_batch_async(self, batch: AppendBatch, **_: object) -> list[Appended | MillstreamError]:
        return [MillstreamError("not here") for _ in batch.write_ids]

    def session(self, _name: str, **_: object) -> SessionFacts:
        return SessionFacts(self._writes)


def test_a_session_is_asked_of_the_writer_that_is_open_now(tmp_path: Path) -> None:
    """After a failover and back in one process, the writer that was closed answered, with the facts of its time."""
    now = [Incarnation(1)]
    server, client = AppendServer(tmp_path / "w.sock", lambda _stream: now[0]), AppendClient(tmp_path / "w.sock")  # type: ignore[arg-type, return-value]
    try:
        client.append_batch("web", AppendBatch.of_request({"clicks": pa.table({"n": [1]})}), deadline_s=5.0)
        now[0] = Incarnation(2)
        assert client.session("web", "till", deadline_s=5.0) == SessionFacts(2)
    finally:
        client.close()
        server.close()
