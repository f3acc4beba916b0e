"""A process that reads a log again and again after its own newest tokens, and opens the log for each read.

That is the pattern of short-lived processes. `main`, with the words FOLDER and UNTIL, reads until the file UNTIL is
there and prints its number of reads and of rows; it ends with a traceback if a token went back.
"""

from __future__ import annotations

import sys
from pathlib import Path

from millstream.model.positions import StreamToken
from millstream.wal.reader import StreamReader


def look(reader: StreamReader, before: StreamToken, seen: set[int]) -> StreamToken:
    """Read new records after a token, as a linear and as a vector reader; return the newest token."""
    token = reader.vector_token()
    assert before <= token, f"a token went back from {before} to {token}"
    assert before.minimum <= reader.cut(before.minimum)
    for records in reader.read_tokens(before, token):
        numbers = records.batch.column("__seq").to_pylist()
        assert not seen & set(numbers)
        seen |= set(numbers)
    return token


def main(words: list[str]) -> int:
    folder, until = words[0], Path(words[1])
    seen: set[int] = set()
    token = StreamToken.scalar(StreamReader(folder).stream_id, StreamReader(folder).first_seq() - 1)
    looks = 0
    is_last = False
    while not is_last:
        is_last = until.exists()
        token = look(StreamReader(folder), token, seen)
        looks += 1
    sys.stdout.write(f"{looks} {len(seen)}\n")
    return 0
