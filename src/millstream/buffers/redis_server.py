"""The server under a buffer in Redis: connection, names of keys, durability check, and translation of errors."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import BufferMissing, BufferRefused, BufferUnavailable, WriteBufferError
from millstream.errors.missing_extras import missing_extra
from millstream.model.addresses import MASK, mask_address
from millstream.model.ids import ShardId

if TYPE_CHECKING:
    from redis import Redis

_ANSWERS_WITHIN_S: Final = 5.0
"""Seconds that one answer may take; then the connection is dropped, and the request is repeated on another one."""
_BUSY: Final = ("BUSY ", "BUSYKEY")
_GONE: Final = "MISSING"
_SAFE: Final = {"appendonly": ("yes",), "appendfsync": ("always",), "no-appendfsync-on-rewrite": ("no",)}
"""Settings without which an acknowledged operation may be lost: with the machine, or with the process."""
_EVICTS: Final = "allkeys-"

logger = logging.getLogger("millstream.buffers.redis")


class RedisKeys:
    """Names of a buffer's keys; the part in braces makes a cluster keep them together."""

    def __init__(self, name: str) -> None:
        self._name = f"{{millstream:{name}}}"
        self.facts: Final = self._name

    def stream(self, shard: ShardId) -> str:
        """Return the key of a shard's operations."""
        return f"{self._name}:{shard}"

    def next(self, shard: ShardId) -> str:
        """Return the key of the shard's next offset."""
        return f"{self._name}:{shard}:next"

    def senders(self, shard: ShardId) -> str:
        """Return the key of the last batch that each sender has stored on a shard."""
        return f"{self._name}:{shard}:senders"


def connect(url: str, name: str, *, timeout_s: float, what: str = "write buffer") -> Redis:
    """Return a client, which connects when it is first used.

    Args:
        name: the name of the user of the connection, for errors.
        timeout_s: bound of one answer, if it is less than the usual bound.
        what: the kind of the user, for errors.

    Raises:
        UsageError (`missing_extra`): redis isn't installed.
        BufferRefused: the address is invalid.
    """
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ModuleNotFoundError as error:
        raise missing_extra(f"{what} {name} needs {error.name}", "redis") from error
    answers_s = min(timeout_s, _ANSWERS_WITHIN_S)
    refused = BufferRefused(
        f"the address of {what} {name} is none, or can be read in two ways",
        hint="Write it as redis://host:6379/0, rediss://… for TLS, or unix://…; %-encode special characters in user and password.",
        buffer=name,
    )
    if mask_address(url) == MASK:
        raise refused
    try:
        # Retries are ours: the client's own retries don't know what is stored.
        return redis.Redis.from_url(
            url,
            socket_timeout=answers_s,
            socket_connect_timeout=answers_s,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),
            client_name="millstream",
        )
    except ValueError:
        raise refused from None  # the client's error quotes a part of the address


@contextmanager
def translated(name: str) -> Iterator[None]:
    """Translate the client's errors into this project's errors."""
    import redis

    try:
        yield
    except redis.RedisError as error:
        raise error_of_redis(error, name) from error


def error_of_redis(error: Exception, name: str, *, what: str = "write buffer") -> WriteBufferError:
    """Return this project's error; `what` and `name` are as in `connect`."""
    import redis

    said = str(error) or type(error).__name__
    if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError):
        return BufferRefused(
            f"Redis refuses {what} {name}: {said}", hint="Mend user and password in its address.", buffer=name
        )
    passing = redis.ReadOnlyError, redis.exceptions.ClusterDownError, redis.exceptions.TryAgainError
    if isinstance(error, redis.ResponseError) and not isinstance(error, passing):
        if said.startswith(_GONE):
            return BufferMissing(f"write buffer {name} is gone from Redis, or was made again", buffer=name)
        if not said.startswith(_BUSY):
            return BufferRefused(
                f"Redis refuses {what} {name}: {said}",
                hint="Look at the server's log and settings: its memory, its disk, the user's rights.",
                buffer=name,
            )
    return BufferUnavailable(f"Redis can't be asked about {what} {name}: {said}", buffer=name)


def check_durable(client: Redis, name: str, *, accept_loss: bool) -> None:
    """Check that the server keeps what it acknowledges.

    Raises:
        WriteBufferError (`buffer_not_durable`): it doesn't, or doesn't show it, and that isn't accepted; details: what is
            wrong.
        BufferUnavailable, BufferRefused: it can't be asked.
    """
    found = _settings(client, name)
    if found is None:
        wrong = ["its settings can't be read (the user may not CONFIG GET)"]
    else:
        wrong = [
            f"{setting} is {found[setting]}, not {safe[0]}"
            for setting, safe in _SAFE.items()
            if found.get(setting, safe[0]) not in safe
        ]
        if int(found.get("maxmemory", "0")) and found.get("maxmemory-policy", "").startswith(_EVICTS):
            wrong.append(f"maxmemory-policy {found['maxmemory-policy']} drops keys where memory is short")
    if not wrong:
        return
    problem = f"the server of write buffer {name} isn't durable: {'; '.join(wrong)}"
    if accept_loss:
        logger.warning("%s", problem)
        return
    raise WriteBufferError(
        problem,
        code="buffer_not_durable",
        hint="Set them on the server (appendonly yes, appendfsync always), or accept the risk: accept_loss = true in "
        "[streams.S.buffer].",
        buffer=name,
        settings=wrong,
    )


def _settings(client: Redis, name: str) -> dict[str, str] | None:
    """Return the server's settings; None if it doesn't show them."""
    found: dict[str, str] = {}
    for setting in (*_SAFE, "maxmemory", "maxmemory-policy"):
        try:
            with translated(name):
                said: Any = client.config_get(setting)
        except BufferRefused:
            return None
        found.update({_text(key): _text(value) for key, value in said.items()})
    return found if set(_SAFE) <= set(found) else None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
