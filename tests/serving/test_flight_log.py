"""A log's bytes over Flight, as Spark's executors read them if they don't see the log's folder."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from tests.app.homes import make_home
from tests.serving.servers import Authority
from tests.serving.test_flight import KEYED, batch, descriptor, put, running

import millstream
from millstream.app.log_readers import open_reader
from millstream.app.open_home import home_appender
from millstream.errors import AccessError, EngineError, Retry, UsageError
from millstream.home.home import Home
from millstream.model.access import Rights
from millstream.model.ids import ShardId, StreamId
from millstream.model.positions import Seq
from millstream.serving.access import Access
from millstream.serving.flight.server import FlightServer
from millstream.serving.tls_files import Certificates
from millstream.testing.errors import coded
from millstream.wal.flight_log import FlightLog, SegmentRequest, joined
from millstream.wal.reader import LogSpan


def test_a_process_without_the_folder_reads_spans_by_flight_as_from_the_folder(tmp_path: Path) -> None:
    with running(tmp_path / "home") as (home, server):
        for number in range(20):
            put(server, descriptor(stream="shop", table="public.orders"), batch(number, number + 100))
        put(server, descriptor(stream="shop", table="public.other"), batch(*range(50_000)))
        own = open_reader(home, "shop")
        spans = own.spans(Seq(0), own.persisted_upto(), bytes_target=2_000)
        assert len(spans) > 3
        some = [spans[1], spans[-1]]
        fetched = FlightLog(server.address, "shop").reader(some)
        for span in some:
            assert fetched.parts_of(span) == own.parts_of(span)
            wanted = [(found.schema, found.batch) for found in own.read_span(span, moments=True)]
            assert [(found.schema, found.batch) for found in fetched.read_span(span, moments=True)] == wanted


def test_bytes_of_a_segment_are_refused_beyond_the_readable_end_and_without_the_right(tmp_path: Path) -> None:
    with running(tmp_path / "home") as (home, server):
        put(server, descriptor(stream="shop", table="public.orders"), batch(1))
        own = open_reader(home, "shop")
        (span,) = own.spans(Seq(0), own.persisted_upto())
        beyond = replace(span, byte_end=span.byte_end + 1)
        with pytest.raises(UsageError, match="no readable bytes"):
            FlightLog(server.address, "shop").reader([beyond])
    text = KEYED + "[http]\ntokens_required = true\n"
    home = Home(make_home(tmp_path / "closed", text))
    home.prepare()
    with home.open_catalog() as catalog:
        _, of_another = catalog.create_access_token(Rights.parse(["web=read"]))
        _, expired = catalog.create_access_token(Rights.parse(["shop=read"]), expires_us=1)
    with running(tmp_path / "closed", text, Access.of_home(home)) as (_, server):
        with pytest.raises(AccessError, check=coded("forbidden")):
            FlightLog(server.address, "shop", token=of_another).reader([span])
        for token in (None, "mst_unknown", expired):
            # Its driver ends, and the next one has a token that is valid.
            with pytest.raises(EngineError, check=coded("log_unreachable")) as caught:
                FlightLog(server.address, "shop", token=token).reader([span])
            assert caught.value.retry is Retry.BACKOFF


def test_a_server_s_own_certificate_is_all_that_executors_trust(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server")
    text = f"{KEYED}[http]\ntls_certificate = '{certificate}'\ntls_key = '{key}'\n"
    home = Home(make_home(tmp_path / "home", text))
    home.prepare()
    with contextlib.closing(home_appender(home)) as appender:
        server = FlightServer(home, Access(None), appender, ("127.0.0.1", 0), Certificates.of_home(home))
        try:
            appended = {"id": 1, "name": "n"}
            with millstream.open(home.path) as opened:
                opened.append("shop", "public.orders", [appended])
            own = open_reader(home, "shop")
            spans = own.spans(Seq(0), own.persisted_upto())
            trusted = FlightLog(server.address, "shop", is_tls=True, authority=certificate.read_bytes())
            assert trusted.reader(spans).parts_of(spans[0]) == own.parts_of(spans[0])
            other, _ = authority.issue("other")
            for wrong in (replace(trusted, authority=other.read_bytes()), replace(trusted, is_tls=False)):
                with pytest.raises(EngineError, check=coded("log_unreachable")):
                    replace(wrong, within_s=0.5).reader(spans)
        finally:
            server.end()


def test_a_server_that_is_not_there_is_told_with_its_address() -> None:
    span = LogSpan(
        ShardId(0), "/log/00000/00000000000000000000.wal", 4096, 4096, Seq(0), Seq(0), (), StreamId(UUID(int=1))
    )
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:1", check=coded("log_unreachable")):
        FlightLog("127.0.0.1:1", "shop", within_s=0.1).reader([span])


@pytest.mark.parametrize(
    "text", ['{"ranges": 1}', '{"ranges": [[2, 1]], "stream": "shop", "shard": 0, "base": 0}', '{"ranges": []}']
)
def test_a_malformed_request_for_bytes_is_a_typed_error(text: str) -> None:
    with pytest.raises(UsageError):
        SegmentRequest.parse(text.encode())


def test_ranges_that_touch_are_one() -> None:
    assert list(joined([(10, 20), (0, 4), (4, 6), (12, 15), (20, 21)])) == [(0, 6), (10, 21)]
