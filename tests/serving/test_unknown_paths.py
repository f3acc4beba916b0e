"""An unknown path, method or parameter is reported by name, with the known ones."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest
from tests.app.homes import make_home, wait_for
from tests.app.served import serving

from millstream.serving.unknown_paths import unknown_path

TEMPLATES = ["/v1/streams", "/v1/streams/{stream}/token", "/v1/streams/{stream}/tables/{table}", "/status"]


def test_what_there_is_not_is_refused_by_name(tmp_path: Path) -> None:
    json = {"content-type": "application/json"}
    with serving(make_home(tmp_path / "web", "[streams.web]\n")) as url:
        for method, path, status, code, hint in (
            ("GET", "/v1/stream/web/token", 404, "unknown_path", "/v1/streams/{stream}/token"),
            ("POST", "/v1/streams/web/table/x", 404, "unknown_path", "/v1/streams/{stream}/tables/{table}"),
            ("GET", "/streams", 404, "unknown_path", "Did you mean /v1/streams?"),
            ("GET", "/zzzzzzzz", 404, "unknown_path", "/docs"),
            ("POST", "/v1/streams/web/consumers/c/recieve", 404, "unknown_path", "/consumers/{consumer}/receive?"),
            ("POST", "/v1/streams/web/consumers/c/pull", 404, "unknown_path", "/v1/streams/{stream}/consumers?"),
            ("GET", "/v1/streams/web/tables/x", 405, "method_not_allowed", "Use POST."),
            ("PUT", "/status", 405, "method_not_allowed", "Use GET."),
            ("PUT", "/v1/streams/web/consumers", 405, "method_not_allowed", "Use GET, POST."),
            ("PUT", "/v1/streams/web/consumers/c", 405, "method_not_allowed", "Use GET, DELETE."),
            ("POST", "/v1/streams/web/tables/x?on_clsh=rows", 400, "usage", "Use one of: on_clash, deadline_s."),
            ("GET", "/v1/streams/web/token?vecto=1", 400, "usage", "Use one of: vector."),
            ("GET", "/status?all=1", 400, "usage", "takes none"),
            ("POST", "/v1/streams/web/query?sql=x", 400, "usage", "takes none"),
            ("GET", "/v1/streams/web/latest", 400, "usage", "/docs"),
            ("GET", "/v1/streams/web/token?vector=perhaps", 400, "usage", "/docs"),
        ):
            answer = httpx.request(
                method, url + path, headers=json, content=b'{"n": 1}' if method == "POST" else None, timeout=60
            )
            found = answer.json()
            assert (answer.status_code, found["status"], found["code"]) == (status, status, code), (path, found)
            assert found["type"] == f"urn:millstream:error:{code}"
            assert hint in found["hint"], (path, found)
            assert answer.headers.get("allow", "") == (hint[4:-1] if status == 405 else "")

        # InfluxDB's clients, and health checks, send parameters of their own.
        def is_written() -> bool:
            answer = httpx.post(f"{url}/write?db=web&consistency=one", content=b"m f=1", timeout=60)
            assert answer.status_code in {204, 429}, answer.text
            return answer.status_code == 204

        wait_for(is_written)  # until its parser is compiled it takes none
        for path in ("/ping?verbose=true", "/health?x=1", "/metrics?x=1"):
            assert httpx.get(url + path, timeout=60).status_code in {200, 204}, path


@pytest.mark.parametrize("path", ["/", "//", "/" * 60_000, "/v1/streams/" + "a/" * 20_000, "/\u0000ü"])
def test_a_path_of_any_length_is_answered(path: str) -> None:
    assert len(unknown_path(path, TEMPLATES).message) < 300


def test_an_unknown_path_costs_little() -> None:
    """A path of 200 characters took a tenth of a second: some requests a second, without a token, held up all others."""
    templates = [f"/v1/streams/{{stream}}/consumers/{{consumer}}/action{number}" for number in range(30)]
    began_s = time.process_time()
    for path in ("/a" * 100, "/v1/streams/" + "s" * 150 + "/consumers/x/actoin", "/v1/" * 25):
        for _ in range(20):
            unknown_path(path, templates)
    assert time.process_time() - began_s < 0.5
