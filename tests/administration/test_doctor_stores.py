"""`doctor` at an object store: it writes, reads and deletes an object of its own, and names the step that failed."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import boto3
import httpx
import obstore
import pytest
from obstore.store import S3Store
from tests.app.homes import make_home

from millstream.administration.doctor import Diagnosis, examine
from millstream.errors import LakeUnavailable
from millstream.home.config_mapping import lake_layout
from millstream.home.home import Home
from millstream.lake.commit_cuts import first_cut, last_cut
from millstream.lake.store_errors import plain_text, store_error
from millstream.model.ids import StreamId
from millstream.testing.s3 import EmbeddedS3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedS3]:
    with EmbeddedS3(tmp_path_factory.mktemp("s3")) as server:
        yield server


def home_at(folder: Path, store: EmbeddedS3, *, bucket: str = "", endpoint: str = "", **keys: str) -> Home:
    options = store.lake_options | {f"AWS_{name.upper()}": value for name, value in keys.items()}
    options |= {"AWS_ENDPOINT_URL": endpoint or store.endpoint}
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


@pytest.mark.long
def test_a_lake_in_an_object_store_is_written_read_and_left_as_it_was(store: EmbeddedS3, tmp_path: Path) -> None:
    told = told_of_the_lake(home_at(tmp_path, store))
    assert (told.code, told.message) == ("ok", f"{store.url}/lake: an object could be written, read and deleted")
    assert objects(store) == []


@pytest.mark.long
def test_a_bucket_that_is_not_there_and_a_store_that_does_not_answer_are_found(
    store: EmbeddedS3, tmp_path: Path
) -> None:
    told = told_of_the_lake(home_at(tmp_path / "0", store, bucket="no-such-bucket"))
    assert (told.code, told.blocks) == ("lake_bucket_missing", "home")
    assert "s3://no-such-bucket/lake: the bucket doesn't exist" in told.message
    assert "Create the bucket" in told.fix
    told = told_of_the_lake(home_at(tmp_path / "1", store, endpoint="http://127.0.0.1:1"))
    assert (told.code, told.blocks) == ("lake_unavailable", "home")
    assert "an object can't be written" in told.message
    assert told.message.isprintable()
    assert "storage_options" in told.fix


@contextlib.contextmanager
def keys_checked(store: EmbeddedS3) -> Iterator[dict[str, str]]:
    """Have the server check keys until the block ends; return those of a user without any right."""

    def after_requests(count: float) -> None:
        headers = {"content-type": "text/plain"}
        httpx.post(f"{store.endpoint}/moto-api/reset-auth", content=str(count), headers=headers).raise_for_status()

    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    client = boto3.client("iam", endpoint_url=store.endpoint, **keys)
    client.create_user(UserName="reader")
    made = client.create_access_key(UserName="reader")["AccessKey"]
    after_requests(0)
    try:
        yield {"access_key_id": made["AccessKeyId"], "secret_access_key": made["SecretAccessKey"]}
    finally:
        after_requests(math.inf)


def test_refused_keys_and_missing_rights_are_told_apart_and_no_file_is_said_to_be_gone(
    store: EmbeddedS3, tmp_path: Path
) -> None:
    with keys_checked(store) as keys:
        for code, given, said in (
            ("lake_forbidden", keys, "the keys may not do this (AccessDenied"),
            ("lake_credentials", keys | {"secret_access_key": "wrong"}, "SignatureDoesNotMatch"),
            ("lake_credentials", {}, "InvalidAccessKeyId"),
        ):
            home = home_at(tmp_path / f"{code}{len(given)}{said[:5]}", store, **given)
            told = told_of_the_lake(home)
            assert (told.code, told.blocks) == (code, "home"), told
            assert said in told.message
            assert keys["secret_access_key"] not in told.message
            layout = lake_layout(home, "web", home.config.streams["web"], StreamId(UUID(int=1)))
            for call in (last_cut, first_cut):
                with pytest.raises(LakeUnavailable) as caught:
                    call(layout)
                assert caught.value.code == code
    home = home_at(tmp_path / "gone", store, bucket="no-such-bucket")
    layout = lake_layout(home, "web", home.config.streams["web"], StreamId(UUID(int=1)))
    for call in (last_cut, first_cut):
        with pytest.raises(LakeUnavailable, match="the bucket doesn't exist"):
            call(layout)


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


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Error performing PUT http://169.254.169.254/latest/api/token in 1s", "lake_credentials"),
        ("an error occurred while loading credentials: failed to load IMDS session token", "lake_credentials"),
        ("403 Forbidden <Error><Code>ExpiredToken</Code><Message>The token has expired.</Message>", "lake_credentials"),
        ("404 Not Found <Error><Code>NoSuchBucket</Code></Error>", "lake_bucket_missing"),
        ("<?xml?><Error><Code>ContainerNotFound</Code>\n<Message>…</Message></Error>", "lake_bucket_missing"),
        (
            "HTTP error\n client error (Connect)\n received corrupt message of type InvalidContentType",
            "lake_tls_differs",
        ),
        (
            "curlCode: 35, SSL connect error; Details: TLS connect error: SSL routines::wrong version number",
            "lake_tls_differs",
        ),
        ("400 Bad Request: Client sent an HTTP request to an HTTPS server.", "lake_tls_differs"),
        ("400 Bad Request: The plain HTTP request was sent to HTTPS port", "lake_tls_differs"),
        ("404 Not Found <Error><Code>NoSuchKey</Code></Error>", None),
        ("a row with <Code>Gold</Code>", None),
    ],
)
def test_what_a_store_says_has_one_meaning(text: str, code: str | None) -> None:
    found = store_error("s3://bucket/lake", OSError(text))
    assert (None if found is None else found.code) == code
    assert store_error("/a/folder", OSError(text)) is None


def test_a_clients_dump_of_its_own_values_is_left_out() -> None:
    error = obstore.exceptions.GenericError(
        'the \x1b[31mstore\x1b[0m failed\n\nDebug source:\nGeneric {\n  store: "S3",\n}'
    )
    assert plain_text(error) == "the store failed"
