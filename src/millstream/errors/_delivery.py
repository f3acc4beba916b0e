"""Errors of delivery to consumers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from millstream.errors._root import Code, MillstreamError, Retry


class DeliveryError(MillstreamError):
    """A consumer can't be made, found or used as asked."""

    code = "delivery"
    codes: ClassVar[Mapping[str, Code]] = {
        "invalid_consumer": Code(
            "A consumer's definition is invalid; nothing was made. Details: field, if it is one field's.",
            hint="Correct the definition, and send it again.",
            exit_code=2,
        ),
        "consumer_exists": Code(
            "A consumer of that name exists, with another definition; nothing was changed. Details: stream, consumer.",
            Retry.OPERATOR,
            "Choose another name, or remove the consumer first: `millstream consumer rm NAME`.",
            exit_code=2,
        ),
        "consumer_configured": Code(
            "The consumer is in `millstream.toml`, or was, which alone can do this; nothing was changed. Details: stream, consumer.",
            Retry.OPERATOR,
            "Change `[streams.S.consumers.C]` in millstream.toml, and restart what runs.",
            exit_code=2,
        ),
        "consumer_pushed": Code(
            "The consumer has a push sink, such as a webhook, which gets its messages. Details: stream, consumer.",
            hint="Make a consumer without a sink to receive messages.",
            exit_code=2,
        ),
        "backfill_running": Code(
            "A backfill of the consumer runs, and another one can't; nothing was changed. Details: stream, consumer.",
            Retry.BACKOFF,
            "Wait until `backfill` of `millstream consumer show` is null; a rewind ends it.",
        ),
        "unknown_consumer": Code(
            "The stream has no consumer of that name; details: stream, consumer.",
            hint="List the stream's consumers: `millstream consumer ls`, or GET `/v1/streams/{stream}/consumers`.",
            exit_code=2,
        ),
        "consumer_state_missing": Code(
            "The file of the consumers' state was moved, removed or replaced; nothing is acknowledged until it is back. Details: file.",
            Retry.OPERATOR,
            "Put the folder `data/delivery` back where it was, from the place that it was moved to. Only if you have to take it"
            " from a backup, restart the process that has the consumers. If it is lost, `millstream consumer repair` shows the"
            " consumers that are lost with it, and can go on without them.",
        ),
        "consumer_state_unreadable": Code(
            "The file of the consumers' state is damaged or no such file; nothing of it was changed. Details: file.",
            Retry.OPERATOR,
            "Restore the file from a backup or promote a follower; or run `millstream consumer repair`, which shows what is "
            "lost by going on without the damaged part.",
        ),
    }
