"""A quarantined table holds its own records and a consumer's cursor; other tables go on."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.app.homes import make_home
from tests.wal.test_records_json import ITEMS, RAW, operation, ops, row

from millstream.delivery.service import StreamConsumers
from millstream.home.home import Home
from millstream.model.ids import ShardId
from millstream.model.records import Op
from millstream.wal.writing.writer import LogWriter
from millstream.writers.home_consumers import surroundings


def test_a_quarantined_table_holds_its_own_records_and_the_cursor_until_it_is_well(tmp_path: Path) -> None:
    home = Home(make_home(tmp_path / "home", "[streams.web]\n"))
    home.prepare()
    with home.open_catalog() as catalog:
        stream = catalog.resolve_stream("web")
        _, epoch = catalog.register_writer(stream)
        with LogWriter.open(
            str(home.wal_folder("web")),
            stream=stream,
            shards=[ShardId(0)],
            epoch=epoch,
            reservations=catalog.reservations(stream),
        ) as log:
            log.append(ops([operation(1, 16)], (RAW, 0, [row(0, Op.CREATE, message=b"I")])))
            for n in range(2):
                log.append(ops([operation(2 + n, 32 + 16 * n)], (ITEMS, 0, [row(0, Op.CREATE, id=n)])))
        quarantined = {RAW.table_id: "public.broken"}
        around = replace(surroundings(home, catalog, "web"), quarantined=lambda: quarantined)
        with closing(StreamConsumers(around)) as consumers:

            def call(what: str, **body: Any) -> Any:
                return consumers.call(what, "search", body).body

            def acked(messages: list[dict[str, Any]]) -> list[str]:
                call("ack", ack_ids=[message["ack_id"] for message in messages])
                return [json.loads(message["record"])["table"] for message in messages]

            begin = consumers.call("create", None, {"name": "search", "start": "earliest"}).body["cursor"]
            assert acked(call("receive")["messages"]) == ['public."Order Items"'] * 2
            shown = call("show")
            assert shown["error"] == "records wait because their table is quarantined: public.broken"
            assert (shown["cursor"], shown["lag"]["records"]) == (begin, 3)
            quarantined.clear()
            assert acked(call("receive", wait_for_ms=20_000)["messages"]) == ["public.broken"]
            shown = call("show")
            assert (shown["error"], shown["lag"]["records"]) == (None, 0)
