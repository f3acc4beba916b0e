"""`doctor` at an object store: it writes, reads and deletes an object of its own, and names the step that failed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store
from tests.app.homes import make_home

from millstream.app.doctor import Diagnosis, examine
from millstream.home.home import Home
from millstream.testing.s3 import EmbeddedS3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedS3]:
    with EmbeddedS3(tmp_path_factory.mktemp("s3")) as server:
        yield server


def home_at(folder: Path, store: EmbeddedS3, *, bucket: str = "", endpoint: str = "") -> Home:
    options = {f"aws_{name}": value for name, value in store.options.items()}
    options |= {"aws_endpoint": endpoint or store.endpoint, "max_retries": "0", "timeout": "5s"}
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items())
    location = f"s3://{bucket}/lake" if bucket else f"{store.url}/lake"
    return Home(
        make_home(
            folder,
            f"[streams.web.lake]\nlocation = {json.dumps(location)}\n[streams.web.lake.storage_options]\n{lines}",
        )
    )


def told_of_the_lake(home: Home) -> Diagnosis:
    return next(found for found in examine(home, lambda _: None) if found.check == "lake of web")


def objects(store: EmbeddedS3) -> list[str]:
    options = {name: value for name, value in store.options.items() if name != "allow_http"}
    bucket = S3Store.from_url(store.url, config=options, client_options={"allow_http": True})
    return [one["path"] for page in obstore.list(bucket) for one in page]


def test_a_lake_in_an_object_store_is_written_read_and_left_as_it_was(store: EmbeddedS3, tmp_path: Path) -> None:
    told = told_of_the_lake(home_at(tmp_path, store))
    assert (told.code, told.message) == ("ok", f"{store.url}/lake: an object could be written, read and deleted")
    assert objects(store) == []


def test_a_bucket_that_is_not_there_and_a_store_that_does_not_answer_are_found(
    store: EmbeddedS3, tmp_path: Path
) -> None:
    for number, asked in enumerate(({"bucket": "no-such-bucket"}, {"endpoint": "http://127.0.0.1:1"})):
        told = told_of_the_lake(home_at(tmp_path / str(number), store, **asked))
        assert (told.code, told.blocks) == ("lake_unavailable", "home")
        assert "an object can't be written" in told.message
        assert "storage_options" in told.fix


def test_a_store_that_logs_are_shipped_to_is_written_read_and_left_as_it_was(
    store: EmbeddedS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in store.options.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    for bucket, code, said in (
        (store.url, "ok", "an object could be written, read and deleted; nothing is stored yet"),
        ("s3://no-such-bucket", "store_unavailable", "no-such-bucket"),
    ):
        text = f'[streams.web]\n[replication]\nnode = "a"\nobject_store = "{bucket}/logs"\n'
        home = Home(make_home(tmp_path / code, text))
        told = next(found for found in examine(home, lambda _: None) if found.check == "object store of web")
        assert told.code == code, told
        assert said in told.message
    assert objects(store) == []
