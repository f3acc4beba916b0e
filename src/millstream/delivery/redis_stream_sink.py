"""Redis streams as a push sink: one entry for each message, with the fields `id`, `op` and `record`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from millstream.buffers.redis_server import connect, error_of_redis
from millstream.delivery.redis_stream_names import DEFAULT, Destinations, template_fault
from millstream.delivery.sink_settings import SinkSettings
from millstream.delivery.sinks import ACCEPTED, Outcome, Pacing, PushMessage, Verdict, failed
from millstream.errors import BufferRefused, BufferUnavailable
from millstream.model.addresses import mask_address

_KNOWN: Final = ("location", "stream", "maxlen")
_MAXLEN_MAX: Final = 2**53
_TIMEOUT_S: Final = 30.0
_WHAT: Final = "consumer"


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """Valid settings, with their defaults. Made by `parse`."""

    location: str = field(repr=False)
    stream: str
    """Template of the names of the Redis streams."""
    maxlen: int
    """Number of entries that a Redis stream keeps; 0: all."""

    @classmethod
    def parse(cls, settings: object, *, is_trusted: bool = False) -> RedisSettings:
        """Read settings.

        Args:
            settings: a JSON value, or the table of the configuration file.
            is_trusted: whether the address may be a socket of this machine, which other users can't reach. It may in the configuration file
                alone.

        Raises:
            DeliveryError (`invalid_consumer`): a setting is missing, unknown or not valid. It shows no secret.
        """
        fields = SinkSettings("redis", settings, _KNOWN)
        location = fields.text("location", hint="Write it as redis://host:6379/0, or rediss://… for TLS.")
        if location.lower().startswith("unix:") and not is_trusted:
            hint = "Define the consumer in millstream.toml, as [streams.S.consumers.C.redis]."
            fields.refuse("location", "can be a Unix socket only in millstream.toml", hint)
        template = fields.text("stream", DEFAULT)
        fault = template_fault(template)
        if fault is not None:
            fields.refuse("stream", fault, "Use {stream}, {schema} and {table}.")
        try:
            connect(location, "", timeout_s=_TIMEOUT_S, what=_WHAT).close()
        except BufferRefused as error:
            fields.refuse("location", "isn't the address of a Redis server, or can be read in two ways", error.hint)
        return cls(location, template, fields.whole("maxlen", 0, 0, _MAXLEN_MAX))

    def as_dict(self, *, masked: bool = True) -> dict[str, Any]:
        """Return every setting; `parse` reads it again.

        Args:
            masked: whether secrets in the address are replaced by `***`.
        """
        location = mask_address(self.location) if masked else self.location
        return {"location": location, "stream": self.stream, "maxlen": self.maxlen}


class RedisStreamSink:
    """Streams of a Redis server: `sinks.PushSink`. A batch is one transaction.

    Args:
        settings: the settings.
        stream: the name of the consumer's stream.
        consumer: the consumer's name.
    """

    def __init__(self, settings: RedisSettings, *, stream: str, consumer: str) -> None:
        self._settings = settings
        self._destinations = Destinations(settings.stream, stream)
        self._consumer = consumer
        self._client = connect(settings.location, consumer, timeout_s=_TIMEOUT_S, what=_WHAT)

    @property
    def pacing(self) -> Pacing:
        """See `sinks.PushSink`."""
        return Pacing()

    def deliver(self, messages: Sequence[PushMessage]) -> Outcome:
        """See `sinks.PushSink`."""
        import redis

        maxlen = self._settings.maxlen or None
        try:
            with self._client.pipeline(transaction=True) as batch:
                for message in messages:
                    entry: Any = {"id": message.id, "op": message.value["op"], "record": message.record}
                    batch.xadd(self._destinations.of(message), entry, maxlen=maxlen, approximate=False)
                batch.execute()
        except redis.RedisError as error:
            told = error_of_redis(error, self._consumer, what=_WHAT)
            if isinstance(error, redis.ConnectionError) and self._answers():
                return failed(told.message)  # it hangs up on these messages: one is too large for it
            # No message was judged: the server can't be asked, refuses the login, or has no memory or disk left.
            unjudged = redis.ConnectionError, redis.exceptions.OutOfMemoryError
            if isinstance(told, BufferUnavailable) or isinstance(error, unjudged) or "MISCONF" in told.message:
                return Outcome(Verdict.REFUSED, told.message)
            return failed(told.message)
        return ACCEPTED

    def _answers(self) -> bool:
        import redis

        try:
            return bool(self._client.ping())
        except redis.RedisError:
            return False

    def close(self) -> None:
        """See `sinks.PushSink`."""
        self._client.close()


def open_redis(settings: Mapping[str, Any], *, stream: str, consumer: str) -> RedisStreamSink:
    """Return a sink. This function is a `sinks.SinkFactory`."""
    return RedisStreamSink(RedisSettings.parse(settings, is_trusted=True), stream=stream, consumer=consumer)
