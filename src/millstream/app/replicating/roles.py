"""Who leads a stream, as this node has it: durable facts, a file a stream, that every process of the home goes by.

`data/replication/STREAM/role.json`. A home without the file leads: it is alone. Promises only grow, and are durable before anybody is told of
them; so a node that has promised an epoch never again takes anything from a leader of a lower one, whatever becomes of it.
"""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millstream.app.home import replace_file
from millstream.errors import CatalogError, Fenced, ReadOnly
from millstream.model.ids import Epoch
from millstream.model.replication import NodeName

if TYPE_CHECKING:
    from millstream.app.home import Home
    from millstream.app.part import Lifeline

LOOK_EVERY_S: Final = 0.2
"""How often a process looks whether its node still leads."""


class Part(StrEnum):
    """What a node does with a stream."""

    LEADS = "leads"
    FOLLOWS = "follows"
    FENCED = "fenced"
    """It has led, and another node was promoted since: it writes nothing, and what it alone has is still here."""


@dataclass(frozen=True, slots=True)
class StreamRole:
    """What a node does with a stream, and what it has promised."""

    part: Part = Part.LEADS
    promised: Epoch = Epoch(0)  # a NewType of int
    """The greatest epoch of leaders that this node has promised, or has itself."""
    leader: NodeName | None = None
    """Who leads, as far as it knows."""
    since_s: float = 0.0
    """When it became so: seconds since 1970 UTC."""


class Roles:
    """A home's roles. Cheap to ask again and again; any thread, any process."""

    def __init__(self, home: Home) -> None:
        self._home: Final = home
        self._known: dict[str, tuple[tuple[int, int, int], StreamRole]] = {}

    def of(self, stream: str) -> StreamRole:
        """What is so now.

        Raises:
            CatalogError: the file is damaged.
        """
        file = role_file(self._home, stream)
        try:
            stat = file.stat()
        except FileNotFoundError:
            return StreamRole()
        seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        known = self._known.get(stream)
        if known is None or known[0] != seen:
            known = seen, _read(file)
            self._known[stream] = known
        return known[1]

    def leads(self, stream: str) -> bool:
        """Whether this node leads a stream."""
        return self.of(stream).part is Part.LEADS

    def follows_any(self) -> bool:
        """Whether a stream is followed here."""
        return any(self.of(stream).part is Part.FOLLOWS for stream in self.streams())

    def streams(self) -> list[str]:
        """Those that have a file."""
        return sorted(file.parent.name for file in (self._home.data / "replication").glob("*/role.json"))

    def check_leads(self, stream: str) -> None:
        """Return where this node may write the stream.

        Raises:
            ReadOnly: it follows; `leader` says whom.
            Fenced: another node was promoted.
        """
        role = self.of(stream)
        if role.part is Part.LEADS:
            return
        leader = role.leader or "another node"
        address = self._home.config.replication.nodes.get(str(role.leader))
        at = f" ({address})" if address else ""
        kind, what = (ReadOnly, "follows") if role.part is Part.FOLLOWS else (Fenced, "has led, and is followed by")
        raise kind(
            f"this node {what} {leader}{at} in stream {stream}",
            stream=stream,
            leader=role.leader,
            address=address,
            epoch=int(role.promised),
        )

    @contextmanager
    def changing(self, stream: str) -> Iterator[Changing]:
        """Change what is so, durably, one process at a time."""
        folder = role_file(self._home, stream).parent
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".role.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield Changing(role_file(self._home, stream), self.of(stream))


@contextmanager
def ending_with_lead(home: Home, lifeline: Lifeline) -> Iterator[None]:
    """Have a part of a home end once this node leads a stream no more that it led when the block began; the supervisor starts it anew."""
    roles = Roles(home)
    led = [name for name in home.config.streams if roles.leads(name)]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_EVERY_S):
            if not all(roles.leads(name) for name in led):
                lifeline.stop.set()
                return

    watching = threading.Thread(target=watch, name="lead-watch", daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


class Changing:
    """A stream's role while it is changed."""

    def __init__(self, file: Path, role: StreamRole) -> None:
        self._file = file
        self.role = role

    def put(self, part: Part, promised: Epoch, leader: NodeName | None) -> StreamRole:
        """Make it so, durably. A promise never shrinks."""
        assert promised >= self.role.promised, "a promise never shrinks"
        self.role = StreamRole(part, promised, leader, time.time())
        facts = {"part": part.value, "promised": promised, "leader": leader, "since": self.role.since_s}
        replace_file(self._file, json.dumps(facts) + "\n")
        return self.role


def role_file(home: Home, stream: str) -> Path:
    """Where it stands."""
    return replication_folder(home, stream) / "role.json"


def replication_folder(home: Home, stream: str) -> Path:
    """What a node keeps of a stream beside its log: its role, the leader's documents."""
    return home.data / "replication" / stream


def acks_file(home: Home, stream: str) -> Path:
    """What followers hold, as the shipper tells the owner."""
    return home.data / "replication" / f"{stream}.acks"


def _read(file: Path) -> StreamRole:
    try:
        facts: dict[str, Any] = json.loads(file.read_bytes())
        leader = facts["leader"]
        return StreamRole(
            Part(facts["part"]),
            Epoch(int(facts["promised"])),
            None if leader is None else NodeName(leader),
            float(facts["since"]),
        )
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CatalogError(
            f"{file} can't be read: {error}",
            hint="It says whether this node leads the stream. Where it leads for certain, remove the file; else follow the leader anew: millstream follow --rebuild.",
        ) from error
