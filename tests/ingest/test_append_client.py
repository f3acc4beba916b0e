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

from millstream.errors import AppendOutcomeUnknown
from millstream.ingest.append_client import AppendClient, AsyncAppendClient, _taken
from millstream.ingest.socket_protocol import HELLO, LENGTHS
from millstream.model.writes import AppendBatch


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
