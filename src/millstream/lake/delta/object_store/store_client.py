"""Objects of a lake by one request each, through obstore: delta-rs's client takes several, and has no conditional write.

It is for S3 with keys that the options or the environment name. For everything else there is no such client, and the caller
goes by delta-rs: it finds keys in more places, and commits in other ways if it is told to.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from types import ModuleType
from typing import Any, Final
from urllib.parse import urlsplit

from millstream.lake.layout import LakeLayout
from millstream.model.addresses import mask_address
from millstream.model.option_flags import is_on

_NAMES: Final = {
    "AWS_ACCESS_KEY_ID": "access_key_id",
    "AWS_SECRET_ACCESS_KEY": "secret_access_key",
    "AWS_SESSION_TOKEN": "session_token",
    "AWS_REGION": "region",
    "AWS_ENDPOINT_URL": "endpoint",
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "virtual_hosted_style_request",
}
"""obstore's names of the lake's options."""
_KEYS: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_OTHER_WAYS: Final = (
    "AWS_CONDITIONAL_PUT",
    "AWS_COPY_IF_NOT_EXISTS",
    "AWS_ENDPOINT_URL_S3",
    "AWS_S3_ALLOW_UNSAFE_RENAME",
    "AWS_S3_LOCKING_PROVIDER",
    "AWS_SKIP_SIGNATURE",
)
"""Variables of the environment by which delta-rs commits otherwise, or reaches another place."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object in a folder."""

    name: str
    """Within the folder."""
    tag: str
    """The store's word for the content; another content has another."""


@dataclass(frozen=True, slots=True)
class StoreClient:
    """A folder in an object store.

    Every call raises OSError with the store's answer as its text, as delta-rs's errors have it.

    Concurrency: any number of threads.
    """

    obstore: ModuleType
    store: Any
    folder: str
    """The folder's path in its bucket."""

    def get(self, name: str) -> bytes | None:
        """Return an object's content; None if there is none."""
        with self._errors():
            try:
                return bytes(self.obstore.get(self.store, f"{self.folder}/{name}").bytes())
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise OSError(str(error)) from error
                return None

    def put(self, name: str, content: bytes) -> None:
        """Write an object, in place of another with the name."""
        with self._errors():
            self.obstore.put(self.store, f"{self.folder}/{name}", content, use_multipart=False)

    def put_new(self, name: str, content: bytes) -> str | None:
        """Write an object and return its tag; None if there is one with the name, perhaps by this call.

        The tag is empty if the store's answer has none: `listed` has one.
        """
        with self._errors():
            try:
                put = self.obstore.put
                facts = put(self.store, f"{self.folder}/{name}", content, mode="create", use_multipart=False)
                return str(facts.get("e_tag") or "")
            except (self.obstore.exceptions.AlreadyExistsError, self.obstore.exceptions.PreconditionError):
                return None

    def listed(self, within: str, behind: str = "") -> list[StoredObject]:
        """Return the objects in a folder whose names come after `behind`, by their names in it."""
        folder = f"{self.folder}/{within}"
        with self._errors():
            pages = self.obstore.list(self.store, folder, offset=f"{folder}/{behind}" if behind else None)
            found = [
                StoredObject(str(one["path"])[len(folder) + 1 :], _listed_tag(one)) for page in pages for one in page
            ]
        return sorted(found, key=lambda one: one.name)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self.obstore.exceptions.BaseError as error:
            raise OSError(str(error)) from error


def store_client(layout: LakeLayout, path: str) -> StoreClient | None:
    """Return the client for a folder of the lake; None if there is none for it.

    Raises:
        LakeUnavailable: the store's address isn't encrypted, and nothing allows that.
    """
    parts = urlsplit(path)
    if parts.scheme not in {"s3", "s3a"} or mask_address(path) != path or parts.query or parts.fragment:
        return None
    if "AWS_PROFILE" in layout.storage_options or any(name in os.environ for name in _OTHER_WAYS):
        return None
    named = {name: os.environ[name] for name in (*_NAMES, "AWS_ALLOW_HTTP") if name in os.environ}
    options = named | dict(layout.storage_options)
    if any(not options.get(name) for name in _KEYS):
        return None
    layout.check_encrypted()
    opened = _opened(parts.netloc, tuple(sorted(options.items())), layout.patience_s)
    return None if opened is None else StoreClient(*opened, parts.path.strip("/"))


@lru_cache(maxsize=8)
def _opened(bucket: str, options: tuple[tuple[str, str], ...], patience_s: float) -> tuple[ModuleType, Any] | None:
    try:
        obstore, store = importlib.import_module("obstore"), importlib.import_module("obstore.store")
    except ModuleNotFoundError:
        return None
    config = {_NAMES[name]: value for name, value in options if name in _NAMES}
    allow_http = is_on(dict(options).get("AWS_ALLOW_HTTP", ""))
    retry = {
        "max_retries": 1_000_000,
        "retry_timeout": timedelta(seconds=patience_s),
        "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=15), "base": 2},
    }
    client = {"allow_http": allow_http}
    try:
        return obstore, store.from_url(f"s3://{bucket}", config=config, client_options=client, retry_config=retry)
    except (obstore.exceptions.BaseError, ValueError, TypeError):
        return None  # delta-rs tells what is wrong with the options


def _listed_tag(facts: Mapping[str, Any]) -> str:
    """Return an object's tag; for a store without tags, what tells contents apart as well as it can."""
    return str(facts.get("e_tag") or f"{facts.get('size')} {facts.get('last_modified')}")
