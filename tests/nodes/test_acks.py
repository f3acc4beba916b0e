"""`acks`, by every kind of home: an append is acknowledged once other nodes hold the rows, or it raises an error."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.flight as fl
import pytest
from tests.aio.everywhere import a_home
from tests.app.homes import make_home, run, wait_for
from tests.serving.servers import served

import millstream
from millstream.errors import ConfigError, NotEnoughReplicas, ReplicationError, UsageError
from millstream.home.home import Home
from millstream.model.ids import Epoch, GroupNumber, ShardId
from millstream.model.operations import Appended
from millstream.model.positions import Seq
from millstream.processes.role_locks import RoleLock, holder, writer_role
from millstream.protocol.replication.ack_levels import Holding
from millstream.spark.log_sink import SinkOptions
from millstream.testing.errors import coded
from millstream.wal.files import RealFiles
from millstream.wal.reader import StreamReader
from millstream.wal.replica.acks import AcksFile

NODES = '[replication]\nnode = "a"\nnodes = { a = "grpc://127.0.0.1:1", b = "grpc://127.0.0.1:2", c = "grpc://127.0.0.1:3" }\n'
LOCAL = f"[streams.web]\n{NODES}"
REQUIRED = f'[streams.web]\nacks = "durable(1)"\n{NODES}'
FAR = 1 << 40
TARGET = "/v1/streams/web/tables/clicks"


class Follower:
    """A node's report about a home's stream, as the process that ships the log would write it."""

    def __init__(self, home: Path) -> None:
        found = Home.find(home)
        stream = StreamReader(str(found.wal_folder("web")), durable=True).stream_id
        found.acks_file("web").parent.mkdir(parents=True, exist_ok=True)
        self._acks = AcksFile(RealFiles(), str(found.acks_file("web")), stream, Epoch(FAR))
        self._times = 0

    def hold(self, group: int = FAR, name: str = "north") -> None:
        self._times += 1
        self._acks.tell(Holding(name, Epoch(1), GroupNumber(group), Seq(group), self._times))


@contextmanager
def held_soon(follower: Follower) -> Iterator[None]:
    """Report appends in the block as held a moment later, however long the writer takes to start."""
    over = threading.Event()

    def say() -> None:
        while not over.wait(0.3):
            follower.hold()

    saying = threading.Thread(target=say)
    saying.start()
    try:
        yield
    finally:
        over.set()
        saying.join()


def numbers(home: Path) -> list[int]:
    with millstream.open(home) as opened:
        return [row["n"] for batch in opened.read("web", table="clicks") for row in batch.to_pylist()]


def ask(way: str, where: Path | str, follower: Follower) -> None:
    """Append by one of the kinds of home: two rows that no other node holds, and one that is held in time."""
    with a_home(way, where) as opened:
        assert opened.append("web", "clicks", {"n": 1}).row_count == 1
        with pytest.raises(UsageError, match="no acknowledgement level"):
            opened.append("web", "clicks", {"n": 9}, acks="durable(0)")
        follower.hold(0)
        with pytest.raises(NotEnoughReplicas) as refused:
            opened.append("web", "clicks", {"n": 2}, acks="durable(1)", deadline_s=0.3)
        assert refused.value.details["level"] == "durable(1)"
        with held_soon(follower):
            found = opened.append("web", "clicks", {"n": 3}, acks="durable(1)", deadline_s=30, idempotency_key=way)
        assert found.row_count == 1
        again = opened.append("web", "clicks", {"n": 3}, acks="durable(1)", deadline_s=30, idempotency_key=way)
        assert again.duplicate


@pytest.mark.parametrize("way", ["open", "aio.open"])
def test_an_append_waits_for_the_level_that_it_asks_for_by_every_call(way: str, tmp_path: Path) -> None:
    home = make_home(tmp_path / "web", LOCAL)
    with millstream.open(home) as opened:
        opened.append("web", "clicks", {"n": 0})
    ask(way, home, Follower(home))
    assert numbers(home) == [0, 1, 2, 3]


def test_a_stream_that_asks_for_a_follower_shows_and_acknowledges_what_one_has(tmp_path: Path) -> None:
    home = make_home(tmp_path / "web", REQUIRED)
    with millstream.open(home) as opened, ThreadPoolExecutor() as pool:
        first = pool.submit(opened.append, "web", "clicks", {"n": 0}, deadline_s=60)
        wait_for((home / "data/wal/web/00000/durable.mark").exists)
        wait_for(lambda: StreamReader(str(home / "data/wal/web"), durable=True).persisted_upto() > 0)
        assert numbers(home) == []
        follower = Follower(home)
        follower.hold()
        told = first.result(60)
        assert numbers(home) == [0]
        assert told.token <= opened.token("web")
        follower.hold(1)
        session = opened.session("web", "s")
        with pytest.raises(NotEnoughReplicas) as refused:
            session.append("clicks", {"n": 1}, deadline_s=0.3)
        assert refused.value.details["number"] == 1
        assert numbers(home) == [0]
        assert session.next_number == 2, "the number is the write's, which is there"
        with held_soon(follower):
            assert session.append("clicks", {"n": 1}, number=1).duplicate
        assert session.append("clicks", {"n": 2}).row_count == 1
        assert numbers(home) == [0, 1, 2]
    with millstream.open(home) as opened, held_soon(follower):
        # A new writer doesn't trust a follower that claims more than the log has, until that follower reports
        # something else.
        opened.append("web", "clicks", {"n": 3}, deadline_s=30)
        assert opened.session_facts("web", "s").mark == 2


@pytest.mark.long
def test_a_session_repeats_a_write_that_waits_for_a_follower_when_another_process_takes_the_stream_over(
    tmp_path: Path,
) -> None:
    home = make_home(tmp_path / "web", REQUIRED)
    run_folder = Home.find(home).run_folder
    with (
        millstream.open(home) as first,
        millstream.open(home) as through,
        ThreadPoolExecutor() as pool,
    ):

        def waits(append: Callable[..., Appended], n: int) -> Future[Appended]:
            waiting = pool.submit(append, "clicks", {"n": n}, deadline_s=100)
            wait_for((home / "data/wal/web/00000/durable.mark").exists)
            log = StreamReader(str(home / "data/wal/web"), durable=True)
            wait_for(lambda: log.durable_offset(ShardId(0)) == n + 1)
            return waiting

        repeated = [waits(first.session("web", "first", next_number=1).append, 0)]
        follower = Follower(home)
        follower.hold(0)
        repeated.append(
            waits(through.session("web", "through", next_number=1).append, 1)
        )  # through the first one's socket
        alone = waits(partial(through.append, "web"), 2)
        with RoleLock.take(run_folder, "owner", writer=None):
            wait_for(lambda: not holder(run_folder, writer_role(None)))
        with pytest.raises(NotEnoughReplicas, match="another process writes"):
            alone.result(60)
        assert not any(one.done() for one in repeated)
        with held_soon(follower):
            assert [one.result(60).duplicate for one in repeated] == [True, True]
        assert numbers(home) == [0, 1, 2]


@pytest.mark.siege
def test_requests_commands_and_transfers_name_their_level(tmp_path: Path) -> None:
    home = make_home(tmp_path / "web", '[flight]\nlisten = "127.0.0.1:0"\n' + LOCAL)
    with (
        served(home, until="flight listens") as server,
        httpx.Client(base_url=f"http://{server.address}", timeout=60) as client,
    ):
        assert client.post(TARGET, json={"n": 0}).status_code == 200
        follower = Follower(home)
        bad = client.post(TARGET, json={"n": 9}, headers={"Millstream-Acks": "most"})
        assert (bad.status_code, bad.json()["code"]) == (400, "usage")
        late = client.post(f"{TARGET}?deadline_s=0.3", json={"n": 1}, headers={"Millstream-Acks": "durable(1)"})
        assert (late.status_code, late.json()["code"]) == (503, "not_enough_replicas")
        assert late.headers["Retry-After"]
        assert "durable here" in late.json()["detail"]
        assert "session or key" in late.json()["hint"]
        # The parser of lines may still be compiling, which takes longer than the next request waits.
        wait_for(lambda: client.post("/write?db=web", content="# nothing").status_code != 429)
        lines = client.post(
            "/write?db=web&deadline_s=0.3", content="clicks n=2i", headers={"Millstream-Acks": "durable(2)"}
        )
        assert (lines.status_code, lines.json()["error"].startswith("the write is durable here")) == (503, True)
        with held_soon(follower):
            held = client.post(TARGET, json={"n": 3}, headers={"Millstream-Acks": "durable(1)"})
        assert held.status_code == 200
        for way in ("connect", "aio.connect"):
            ask(way, f"http://{server.address}", follower)
        with fl.connect(f"grpc://{server.flight}") as caller:
            rows = pa.record_batch({"n": [4]})
            asked = {"stream": "web", "table": "clicks", "acks": "durable(1)", "deadline_s": 30}
            writer, told = caller.do_put(fl.FlightDescriptor.for_command(json.dumps(asked)), rows.schema)
            writer.write_batch(rows)
            assert "error" not in json.loads(told.read().to_pybytes())
            writer.close()
            asked = {**asked, "acks": "durable(2)", "deadline_s": 0.3}
            writer, told = caller.do_put(fl.FlightDescriptor.for_command(json.dumps(asked)), rows.schema)
            writer.write_batch(rows)
            assert json.loads(told.read().to_pybytes())["error"]["code"] == "not_enough_replicas"
            with pytest.raises(fl.FlightError):
                writer.close()
        row = '{"n": 5}'
        appended = run(home, "append", "clicks", "--stream", "web", "--acks", "durable(1)", stdin=row)
        assert appended.returncode == 0, appended.stderr
        assert run(home, "append", "clicks", "--stream", "web", "--acks", "all", stdin=row).returncode == 2
    assert numbers(home) == [0, 1, 2, 3, 1, 2, 3, 1, 2, 3, 4, 4, 5]


def test_spark_names_its_level() -> None:
    options = {"path": "/home", "stream": "web", "table": "clicks"}
    assert SinkOptions.parse({**options, "acks": "durable(2)"}).acks == "durable(2)"
    assert SinkOptions.parse(options).acks is None
    with pytest.raises(UsageError, match="no acknowledgement level"):
        SinkOptions.parse({**options, "acks": "2"})


def test_a_level_that_is_none_or_that_nobody_can_tell_is_refused(tmp_path: Path) -> None:
    home = make_home(tmp_path / "web", '[streams.web]\nacks = "two"\n')
    with pytest.raises(ConfigError, match="'two' is no acknowledgement level"), millstream.open(home) as opened:
        opened.append("web", "clicks", {"n": 0})
    buffered = '[streams.web.buffer]\nrole = "writes"\nlocation = "buffer"\ncreate = true\n'
    home = make_home(tmp_path / "buffered", buffered)
    with millstream.open(home) as opened:
        opened.append("web", "clicks", {"n": 0}, acks="local")
        with pytest.raises(ReplicationError, check=coded("ack_level_unavailable"), match="write buffer"):
            opened.append("web", "clicks", {"n": 1}, acks="durable(1)")


@pytest.mark.parametrize(("level", "lacking"), [("durable(3)", "has 2 other nodes"), ("object", "object store")])
def test_a_level_that_nobody_will_ever_reach_is_refused_at_once(tmp_path: Path, level: str, lacking: str) -> None:
    with millstream.open(make_home(tmp_path / "web", LOCAL)) as opened:
        with pytest.raises(ReplicationError, check=coded("ack_level_unavailable"), match=lacking):
            opened.append("web", "clicks", {"n": 0}, acks=level)
        opened.append("web", "clicks", {"n": 1}, acks="local")
    assert numbers(tmp_path / "web") == [1]
