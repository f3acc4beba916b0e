"""Shipping a log's bytes to a follower over Arrow Flight, verified and fsynced; the peer is bare Flight."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.flight as fl

from bench.figures import Figure, asked, compared, measures, say
from bench.places import as_installed, folder
from bench.wal import BATCH_ROWS, ROW_BYTES, log_in, operation
from millstream.errors import LinkLost
from millstream.model.ids import Epoch
from millstream.model.replication import Acknowledgement, Hello, NodeName
from millstream.replication.flight.address import LeaderAddress
from millstream.replication.flight.transport import FlightTransport
from millstream.replication.flight.wire import FollowRequest
from millstream.replication.joined_link import JoinedLink
from millstream.replication.object_store.object_names import behind
from millstream.serving.flight.connections import cut_connections
from millstream.wal.replica.replica_log import ReplicaLog
from millstream.wal.replica.ship_source import ShipSource

ROWS = 2_500_000
_SHIPMENT_BYTES: Final = 4 << 20
"""Bytes of one shipment on both sides: as much as the leader sends at once."""
_SCHEMA: Final = pa.schema([("bytes", pa.uint8())])


@measures("ship_vs_raw_transport")
def ship() -> Iterator[Figure]:
    """Measure a sealed log and its tail, from its first byte until a new follower has acknowledged the last."""
    rows = asked.rows or ROWS
    with folder("ship") as place:
        with log_in(place) as writer:
            values = [[os.urandom(ROW_BYTES) for _ in range(BATCH_ROWS)] for _ in range(20)]
            for number in range(rows // BATCH_ROWS):
                writer.append(operation(values[number % len(values)]))
        wal = place / "wal"
        segments = sorted(wal.rglob("*.wal"))
        size = sum(segment.stat().st_size for segment in segments)
        say(f"ship_vs_raw_transport: {size >> 20} MiB")

        def ours() -> float:
            transport = FlightTransport("bench")
            with _Leader(transport) as leader, _receiver("follow", f"localhost:{leader.port}") as receiver:
                link = transport.accept(60.0)
                assert link is not None
                source, position = ShipSource(str(wal)), dict(link.hello.position)
                began = time.perf_counter()
                while (shipment := source.read(position, _SHIPMENT_BYTES)) is not None:
                    link.send(shipment)
                    position |= {part.shard: behind(part) for part in shipment.parts}
                while True:
                    word = link.recv(60.0)
                    assert isinstance(word, Acknowledgement)
                    if word.position == position:
                        break
                took = time.perf_counter() - began
                link.close()
                receiver.wait(60)
                transport.close()
            return size / (1 << 20) / took

        def peer() -> float:
            with _receiver("raw", "") as receiver:
                assert receiver.stdout is not None
                address = receiver.stdout.readline().strip()
                with fl.connect(f"grpc://{address}") as client:
                    began = time.perf_counter()
                    _put(client, segments)
                    took = time.perf_counter() - began
            return size / (1 << 20) / took

        yield compared(
            "ship_vs_raw_transport", ours, peer, unit="MiB/s", goal=">= 0.8", rows=rows, size_bytes=size,
            note=f"a log of 1 shard in segments of 64 MiB, to a follower in a process of its own, from which every byte is verified and fsynced before it is acknowledged,"
            f" in shipments of {_SHIPMENT_BYTES >> 20} MiB, those that came meanwhile together, as `millstream follow` takes them; the peer sends the same files by DoPut in pieces of that size, each written and fdatasynced by the receiver's process",
        )  # fmt: skip


def _put(client: fl.FlightClient, files: list[Path]) -> None:
    writer, reader = client.do_put(fl.FlightDescriptor.for_path("raw"), _SCHEMA)

    def hear() -> None:
        while reader.read() is not None:
            pass

    told = threading.Thread(target=hear)
    told.start()
    for file in files:
        with file.open("rb") as opened:
            while data := opened.read(_SHIPMENT_BYTES):
                column = pa.Array.from_buffers(pa.uint8(), len(data), [None, pa.py_buffer(data)])
                writer.write_batch(pa.RecordBatch.from_arrays([column], schema=_SCHEMA))
    writer.done_writing()
    told.join()
    writer.close()


class _Leader(fl.FlightServerBase):  # type: ignore[misc] # pyarrow ships no types
    def __init__(self, transport: FlightTransport) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._transport = transport

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        cut = functools.partial(cut_connections, self.port, context.peer())
        self._transport.serve_exchange(FollowRequest.parse(descriptor.command), reader, writer, cut=cut)


class _Raw(fl.FlightServerBase):  # type: ignore[misc] # as above
    def __init__(self, path: Path) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._path = path

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        del context, descriptor
        with (self._path / "raw").open("wb", buffering=0) as file:
            for chunk in reader:
                file.write(memoryview(chunk.data.column(0).buffers()[1])[: len(chunk.data)])
                os.fdatasync(file.fileno())
                writer.write(pa.py_buffer(b"durable"))


@contextmanager
def _receiver(kind: str, address: str) -> Iterator[subprocess.Popen[str]]:
    """Run this module as the receiving process."""
    with folder("received") as path:
        command = [sys.executable, "-m", "bench.replication", kind, str(path), address]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=as_installed())
        try:
            yield process
        finally:
            process.kill()
            process.wait(60)
            assert process.stdout is not None
            process.stdout.close()


def _follow(path: Path, address: str) -> None:
    with closing(ReplicaLog.open(str(path / "wal"))) as log:
        node = NodeName("follower")
        link = JoinedLink(
            FlightTransport("bench", LeaderAddress(address)).connect(Hello(None, node, Epoch(0), {}), 60.0)
        )
        while True:
            try:
                shipment = link.recv(60.0)
            except LinkLost:
                return
            assert shipment is not None
            log.apply(shipment)
            link.send(
                Acknowledgement(
                    node, Epoch(1), log.position(), log.end().group, log.end().persisted_upto, time.time_ns()
                )
            )


if __name__ == "__main__":
    if sys.argv[1] == "follow":
        _follow(Path(sys.argv[2]), sys.argv[3])
    else:
        server = _Raw(Path(sys.argv[2]))
        print(f"127.0.0.1:{server.port}", flush=True)
        server.serve()
