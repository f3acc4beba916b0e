"""A real process, a real disk, SIGKILL at any moment: its output decides what it had acknowledged."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.seeds import Seeds

from millstream.wal.mending.inspect import verify
from millstream.wal.reader import StreamReader

WRITER = """
import sys, uuid
from tests.wal.plain_operations import MemoryReservations, plain_ops, plain_spilled, plain_table
from millstream.wal.writing.writer import LogOptions, LogWriter
folder, epoch, xid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
reservations = MemoryReservations()
reservations.reserve_to(10_000_000 * (epoch - 1), epoch=epoch)
one, other = plain_table(1), plain_table(2)
log = LogWriter.open(folder, stream=uuid.UUID(int=7), shards=[0, 1], epoch=epoch, reservations=reservations,
                     options=LogOptions(segment_bytes=60_000, disk_used_max=1.0))
def answered(xid: int):
    def write(done):
        sys.stdout.write(f"{xid} {done.result().seqs.first}\\n"); sys.stdout.flush()
    return write
sys.stdout.write(f"open {dict(log.reached()).get(1, 0)}\\n"); sys.stdout.flush()
answers = []
while True:
    for _ in range(4):
        if xid % 7 == 0:
            ops = plain_spilled(xid, [[(one, 3, str(xid))], [(other, 4, str(xid)), (one, 2, str(xid))]], shard_of={2: 1})
        else:
            ops = plain_ops({xid: [(one, 1 + xid % 3, str(xid)), (other, xid % 2, str(xid))]}, shard_of={2: 1})
        answers.append(log.submit(ops))
        answers[-1].add_done_callback(answered(xid))
        xid += 1
    answers.pop(0).result()
"""


def rows_of(xid: int):
    return 9 if xid % 7 == 0 else 1 + xid % 3 + xid % 2


def test_sigkill_at_random_moments_loses_nothing_acknowledged(tmp_path: Path, seeds: Seeds):
    seed = seeds.kept_or_new(20261121)
    chance = random.Random(seed)
    folder = str(tmp_path / "wal")
    acknowledged: dict[int, int] = {}
    next_xid, in_flight_kills = 1, 0
    for epoch in range(1, 6):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, folder, str(epoch), str(next_xid)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        opened = process.stdout.readline()
        assert opened.startswith("open "), opened
        wanted = chance.randrange(5, 60)
        lines = [process.stdout.readline() for _ in range(wanted)]
        moment = time.monotonic() + chance.random() * 0.02
        while time.monotonic() < moment:
            continue
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
        process.wait()
        process.stdout.close()
        acknowledged |= {int(a): int(b) for a, b in (line.split() for line in lines if line.endswith("\n"))}
        reader = StreamReader(folder)
        shown: dict[int, list[int]] = {}
        for records in reader.read_between(0, reader.persisted_upto()):
            for xid, seq in zip(*(records.batch.column(c).to_pylist() for c in ("__xid", "__seq")), strict=True):
                shown.setdefault(xid, []).append(seq)
        assert set(acknowledged) <= set(shown), f"seed {seed}"
        assert all(len(seqs) == rows_of(xid) for xid, seqs in shown.items()), f"seed {seed}"
        assert all(min(shown[xid]) == first for xid, first in acknowledged.items()), f"seed {seed}"
        # Recovery may still find a whole group that was never acknowledged; new numbers begin after
        # it either way.
        in_flight_kills += 1
        next_xid = max(shown) + 1000
    report = verify(folder)
    assert report.is_whole, report.losses
    assert in_flight_kills == 5
