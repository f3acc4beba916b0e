"""Records that a consumer's machine has dropped from memory, read from the log again when their messages are delivered or die."""

from __future__ import annotations

from collections.abc import Mapping

from millstream.delivery.records.record_reader import ConsumerReader
from millstream.errors import LogTruncated
from millstream.protocol.delivery import Message


def read_again(dropped: Mapping[int, Message], records: ConsumerReader) -> dict[int, Message]:
    """Return messages with their records, by position.

    Args:
        dropped: messages without them, by position; at least one.
        records: a reader of the consumer's that has read nothing.

    Raises:
        LogTruncated: the log has lost a record.
        CorruptWal …: the log can't be read.
    """
    after, found = min(message.before for message in dropped.values()), dict[int, Message]()
    while len(found) < len(dropped):
        step = records.read(after)
        if step is None:
            raise LogTruncated("the log has lost records that a consumer hasn't settled")
        found.update((message.position, message) for message in step.messages if message.position in dropped)
    return found
