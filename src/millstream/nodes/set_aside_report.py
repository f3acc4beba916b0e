"""The report of an old leader's records that were set aside: each as a line of JSON, and how many of which table."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Final

from millstream.model.positions import Seq
from millstream.private_files import make_folder, replace_file, replacing
from millstream.wal.replica.set_aside import SetAsideTail

RECORDS: Final = "records.jsonl"
REPORT: Final = "report.json"
REPORT_SUFFIX: Final = "-report"
"""Its folder's name, behind the name of the folder that was set aside."""


def write_report(stream: str, found: SetAsideTail, folder: Path) -> Path:
    """Write the report's two files; return the folder that they are in.

    Args:
        found: the part of the log that was set aside.
        folder: the folder to make; an interrupted call may have made it already.

    Raises:
        CorruptWal, OSError: the part can't be read, or the files can't be written; the part itself stays
            set aside.
    """
    from millstream.model.record_json import to_json
    from millstream.wal.reader import StreamReader
    from millstream.wal.records_json import Cat

    make_folder(folder)
    reader = StreamReader(found.folder)
    counts: Counter[str] = Counter()
    with replacing(folder / RECORDS) as output:
        for line in Cat(stream, reader, numbers=(Seq(found.first_seq - 1), None)).lines():
            counts[line["table"] or "_messages"] += 1
            output.write(f"{to_json(line)}\n".encode())
    report = {
        "stream": stream,
        "log": found.folder,
        "records": counts.total(),
        "tables": dict(sorted(counts.items())),
        "first_seq": int(found.first_seq),
        "last_seq": int(reader.persisted_upto()),
        "bytes": found.size_bytes,
    }
    # Written last, and whole: if it exists, the records do too.
    replace_file(folder / REPORT, (json.dumps(report, indent=2) + "\n").encode())
    return folder
