"""One stream, written by HTTP, client, tasks and Spark at once: all of it lands in one lake, with its past."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from pyspark.sql import SparkSession
from tests.app.homes import done, make_home, wait_for
from tests.e2e.harness import land

import millstream
import millstream.aio
from millstream.model.positions import StreamToken
from millstream.testing._servers.ports import free_port

pytestmark = pytest.mark.siege

WEB = '[streams.web]\n[streams.web.keys]\n"public.users" = ["id"]\n'


def rows(way: str, first: int, last: int) -> list[dict[str, Any]]:
    return [{"id": n % 50, "way": way, "n": n} for n in range(first, last)]


def by_spark(spark: SparkSession, url: str) -> None:
    rows = spark.range(0, 500, 1, 3).selectExpr("id % 50 as id", "'spark' as way", "id as n")
    sink = rows.write.format("millstream").mode("append")
    sink.options(url=url, stream="web", table="users", idempotency_id="the job").save()


async def by_tasks(home: Path, url: str) -> None:
    async with millstream.aio.open(home) as here, millstream.aio.connect(url) as there:
        await asyncio.gather(
            *(here.append("web", "users", rows("aio.open", n, n + 5)) for n in range(0, 100, 5)),
            *(there.append("web", "users", rows("aio.connect", n, n + 5)) for n in range(0, 100, 5)),
        )


def by_requests(home: Path, url: str) -> StreamToken:
    """Start all other writers; return a moment while they write."""
    body = "".join(json.dumps(row) + "\n" for row in rows("http", 0, 100))
    for n in range(3):
        headers = {"content-type": "application/x-ndjson", "idempotency-key": f"file {n % 2}"}
        answer = httpx.post(f"{url}/v1/streams/web/tables/users", content=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["duplicate"] == (n == 2)
    with millstream.connect(url) as there:
        acks = [there.append("web", "users", rows("connect", n, n + 10)) for n in range(0, 100, 10)]
        middle = acks[-1].token
        session = there.session("web", "till")
        session.append("clicks", [{"n": 1}, {"n": 2}])
    asyncio.run(by_tasks(home, url))
    return middle


def test_every_way_into_a_stream_lands_in_one_lake(tmp_path: Path, spark: SparkSession) -> None:
    home = make_home(tmp_path / "web", WEB)
    address = f"127.0.0.1:{free_port()}"
    url = f"http://{address}"
    command = [sys.executable, "-m", "millstream.cli", "--home", str(home), "run"]
    environ = {**os.environ, "HOME": "/nonexistent", "MILLSTREAM_HTTP__LISTEN": address}
    log = (tmp_path / "run.log").open("wb")
    running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ)
    beside = ThreadPoolExecutor(1)
    try:

        def ready() -> bool:
            assert running.poll() is None, (tmp_path / "run.log").read_text()
            try:
                return httpx.get(f"{url}/readyz", timeout=60).status_code == 200
            except httpx.TransportError:
                return False

        wait_for(ready, seconds=300, what=(tmp_path / "run.log").read_text)
        requests = beside.submit(by_requests, home, url)
        by_spark(spark, url)  # on this thread, which Spark knows
        middle = requests.result(timeout=600)
    finally:
        running.send_signal(signal.SIGTERM)
        try:
            running.wait(timeout=120)
        finally:
            running.kill()
            running.wait()
            log.close()
            beside.shutdown()
    assert running.returncode == 0, (tmp_path / "run.log").read_text()
    done(home, "capture", "run", "--until-caught-up")
    assert land(home, "web") == {}
    with millstream.open(home) as opened:
        records = [row for batch in opened.read("web", table="users") for row in batch.to_pylist()]
        ways = Counter(row["way"] for row in records)
        assert ways == {"http": 200, "connect": 100, "aio.open": 100, "aio.connect": 100, "spark": 500}
        history = opened.query('select * from history."public.users" order by __seq').to_pylist()
        assert [(row["__seq"], row["id"], row["way"], row["n"]) for row in history] == [
            (row["__seq"], row["id"], row["way"], row["n"]) for row in records
        ]
        for as_of in (None, middle):
            upto = records[-1]["__seq"] if as_of is None else as_of.minimum
            newest = {row["id"]: (row["way"], row["n"]) for row in records if row["__seq"] <= upto}
            found = opened.query("select id, way, n from public.users", as_of=as_of).to_pylist()
            assert {row["id"]: (row["way"], row["n"]) for row in found} == newest
            assert len(found) == len(newest) == 50
        assert opened.query('select n from history."public.clicks" order by n').to_pylist() == [{"n": 1}, {"n": 2}]
