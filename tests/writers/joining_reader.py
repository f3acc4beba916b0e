"""A process that reads a log again and again after its own newest tokens, as processes that come and go do: each look opens the log anew.

`main`, with the words FOLDER and SECONDS, prints how often it looked, how many rows it read, and ends with a traceback where a token went back.
"""

from __future__ import annotations

import sys
import time

from millstream.model.positions import StreamToken
from millstream.wal.reader import StreamReader


def look(reader: StreamReader, before: StreamToken, seen: set[int]) -> StreamToken:
    """Read what is new behind a token, as a linear and as a vector reader; returns the newest token."""
    token = reader.vector_token()
    assert before <= token, f"a token went back from {before} to {token}"
    assert before.minimum <= reader.cut(before.minimum)
    for records in reader.read_tokens(before, token):
        numbers = records.batch.column("__seq").to_pylist()
        assert not seen & set(numbers)
        seen |= set(numbers)
    return token


def main(words: list[str]) -> int:
    folder, seconds = words[0], float(words[1])
    end = time.monotonic() + seconds
    seen: set[int] = set()
    token = StreamToken.scalar(StreamReader(folder).stream_id, StreamReader(folder).first_seq() - 1)
    looks = 0
    while time.monotonic() < end:
        token = look(StreamReader(folder), token, seen)
        looks += 1
    sys.stdout.write(f"{looks} {len(seen)}\n")
    return 0
