"""The page about bulk over Flight runs, block after block, against a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl
from markdown_it import MarkdownIt
from tests.app.homes import done, make_home
from tests.serving.servers import served

PAGE = Path(__file__).parent.parent.parent / "docs" / "how-to" / "bulk-over-flight.md"


def blocks() -> list[str]:
    return [
        token.content
        for token in MarkdownIt().parse(PAGE.read_text())
        if token.type == "fence" and token.info == "python"
    ]


def test_the_page_s_code_runs(tmp_path: Path) -> None:
    text = "[streams.shop]\n[http]\ntokens_required = {}\n[flight]\nlisten = '127.0.0.1:0'\n"
    home = make_home(tmp_path / "home", text.format("false"))
    with served(home) as server:
        said: dict[str, Any] = {}
        *others, with_token = (code.replace("127.0.0.1:8788", server.flight) for code in blocks())
        for code in others:
            exec(compile(code, str(PAGE), "exec"), said)
        assert len(said["durable"]) == 100
        assert said["table"].num_rows == 200
        assert said["table"]["total"].to_pylist()[99] == 148.5
        column = pa.array([said["info"].endpoints[0].ticket.ticket])
        batch = pa.record_batch({"ticket": column})
        assert sum(rows.num_rows for rows in said["read_on_workers"]([batch])) == 200
        said["client"].close()
    make_home(home, text.format("true"))
    token = done(home, "token", "create", "--all", "read").strip()
    with served(home) as server, fl.connect(f"grpc://{server.flight}") as client:
        said = {"client": client, "fl": fl}
        exec(compile(with_token.replace("mst_…", token), str(PAGE), "exec"), said)
