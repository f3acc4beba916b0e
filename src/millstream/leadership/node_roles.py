"""This node's view of who leads a stream: durable facts, a file per stream, that every process of the home goes by.

`data/replication/STREAM/role.json` holds a `RoleFact`, and is replaced by rename. A home without the file
leads: it is alone. `protocol.replication.node_promises` defines what the facts mean.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import Fenced, ReadOnly, RoleUnreadable
from millstream.private_files import make_folder, open_private, replace_file
from millstream.protocol.replication.node_promises import Role, RoleFact
from millstream.workers import watching

if TYPE_CHECKING:
    from millstream.home.home import Home
    from millstream.home.paths import HomePaths
    from millstream.processes.child_process import Lifeline

VERSIONS_NAME: Final = "documents.json"
"""File next to the role on a former or current follower: which of the leader's documents are there."""
LOOK_EVERY_S: Final = 0.2
"""How often a process checks whether its node still leads."""


class Roles:
    """A home's roles. Reads are cheap to repeat; any thread, any process."""

    def __init__(self, home: Home) -> None:
        self._home: Final = home
        self._known: dict[str, tuple[tuple[int, int, int], RoleFact]] = {}

    def of(self, stream: str) -> RoleFact:
        """Return the current fact.

        Raises:
            RoleUnreadable: the file is damaged; or it is gone, and this node has followed.
        """
        file = self._home.role_file(stream)
        try:
            stat = file.stat()
            seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            known = self._known.get(stream)
            if known is None or known[0] != seen:
                known = seen, RoleFact.from_json(file.read_bytes())
                self._known[stream] = known
        except FileNotFoundError:
            if file.with_name(VERSIONS_NAME).exists():
                # Without it this node would count as alone, and write in parallel with its leader.
                raise RoleUnreadable(f"{file} is gone, and a leader's documents are next to it") from None
            return RoleFact()
        except OSError as error:
            raise RoleUnreadable(f"{file}: {error}") from error
        except RoleUnreadable as error:
            raise RoleUnreadable(f"{file}: {error.message}") from error
        return known[1]

    def leads(self, stream: str) -> bool:
        """Return whether this node leads a stream."""
        return self.of(stream).role is Role.LEADS

    def leads_surely(self, stream: str) -> bool:
        """Return as `leads`; an unreadable role counts as not leading. A restart raises the reason."""
        try:
            return self.leads(stream)
        except RoleUnreadable:
            return False

    def streams(self) -> list[str]:
        """Return the streams that have a file."""
        return sorted(file.parent.name for file in (self._home.data / "replication").glob("*/role.json"))

    def check_leads(self, stream: str) -> None:
        """Check that this node may write the stream.

        Raises:
            ReadOnly: it follows; `leader` names the node.
            Fenced: another node was promoted.
        """
        fact = self.of(stream)
        if fact.role is Role.LEADS:
            return
        leader, address = self._named(fact), self._home.config.replication.nodes.get(str(fact.leader))
        facts: dict[str, Any] = {
            "stream": stream,
            "leader": fact.leader or None,
            "address": address,
            "epoch": int(fact.promise.epoch),
        }
        if fact.role is Role.FOLLOWS:
            raise ReadOnly(f"this node follows {leader} in stream {stream}: writes go there", **facts)
        raise Fenced(f"this node leads stream {stream} no more: {leader} was promoted", **facts)

    def led_elsewhere(self, stream: str) -> str | None:
        """Return the other node that leads, with its address; None if this node leads or can't read its role."""
        try:
            fact = self.of(stream)
        except RoleUnreadable:
            return None
        return None if fact.role is Role.LEADS else self._named(fact)

    def _named(self, fact: RoleFact) -> str:
        address = self._home.config.replication.nodes.get(str(fact.leader))
        return f"{fact.leader or 'another node'}{f' ({address})' if address else ''}"

    @contextmanager
    def changing(self, stream: str) -> Iterator[Changing]:
        """Change the fact, durably, one process at a time."""
        folder = self._home.role_file(stream).parent
        make_folder(folder)
        with open(folder / ".role.lock", "w", opener=open_private) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield Changing(self._home.role_file(stream), self.of(stream))


@contextmanager
def ending_with_lead(home: Home, lifeline: Lifeline) -> Iterator[None]:
    """End a part of a home once this node loses the lead of a stream; the supervisor restarts the part."""
    roles = Roles(home)
    led = [name for name in home.config.streams if roles.leads_surely(name)]

    def look() -> bool:
        if all(roles.leads_surely(name) for name in led):
            return True
        lifeline.stop.set()
        return False

    with watching("lead-watch", LOOK_EVERY_S, look):
        yield


class Changing:
    """A stream's role while it is changed."""

    def __init__(self, file: Path, fact: RoleFact) -> None:
        self._file = file
        self.fact = fact

    def put(self, fact: RoleFact) -> None:
        """Store the fact, durably. A promise never shrinks."""
        assert fact.promise >= self.fact.promise, "a promise never shrinks"
        if fact != self.fact or not self._file.exists():
            replace_file(self._file, fact.to_json())
            self.fact = fact


def replication_folder(home: HomePaths, stream: str) -> Path:
    """Return the folder of a node's role and its leader's documents, next to the log."""
    return home.data / "replication" / stream
