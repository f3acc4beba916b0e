"""Durable state of a following node next to its log: its role, the leader's documents, set-aside tails."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from millstream.errors import MillstreamError
from millstream.leadership.known_leaders import note_leaders
from millstream.leadership.node_roles import VERSIONS_NAME, Roles, replication_folder
from millstream.model.ids import GroupNumber
from millstream.model.positions import Seq
from millstream.model.replication import Document
from millstream.nodes.follower_log_retention import CopyRetention
from millstream.nodes.set_aside_report import REPORT, REPORT_SUFFIX, write_report
from millstream.nodes.staleness import note_age
from millstream.private_files import make_folder, replace_file
from millstream.protocol.replication.follower_machine import Lag
from millstream.protocol.replication.node_promises import CONSUMERS, SESSIONS, RoleFact
from millstream.wal.files import RealFiles
from millstream.wal.layout import SESSIONS_NAME
from millstream.wal.replica.set_aside import SetAsideTail, ends_behind, found_aside, truncate_to
from millstream.wal.writing.session_file import covered_in

if TYPE_CHECKING:
    from millstream.home.home import Home

logger = structlog.get_logger("millstream.follow")


class FollowerState:
    """See `FollowerNotes`."""

    def __init__(self, home: Home, name: str) -> None:
        self._home = home
        self._roles = Roles(home)
        self._name = name
        self._retention = CopyRetention(home, name)
        self._folder = replication_folder(home, name)
        make_folder(self._folder)
        self._wal_folder = home.wal_folder(name)

    def versions(self) -> dict[str, int]:
        """Return the versions of the kept documents."""
        # Damaged versions count as none: the leader sends all documents again.
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError, AttributeError):
            found = json.loads((self._folder / VERSIONS_NAME).read_bytes())
            return {str(name): int(version) for name, version in found.items()}
        return {}

    def document(self, name: str) -> bytes | None:
        """Return a kept document; None if it never came."""
        with contextlib.suppress(FileNotFoundError):
            return (self._folder / f"{name}.document").read_bytes()
        return None

    def role(self, fact: RoleFact) -> None:
        """Note the role, as the port requires.

        Raises:
            Fenced: another process of this home has given a higher promise since.
            NodeNameTaken: it has given this promise to another home of the leader's name.
        """
        with self._roles.changing(self._name) as changing:
            if (refusal := changing.fact.refusal_of_old_leader(fact.promise)) is not None:
                raise refusal
            if changing.fact.promise == fact.promise:
                fact = replace(fact, claimant=changing.fact.led_by(fact.claimant).claimant)
            is_new = changing.fact.lineage != fact.lineage
            changing.put(fact)
        if is_new:
            note_leaders(self._home, self._name)

    def check_promise(self, fact: RoleFact) -> None:
        """Check the promise, as the port requires."""
        if (refusal := self._roles.of(self._name).refusal_of_old_leader(fact.promise)) is not None:
            raise refusal

    def documents(self, documents: tuple[Document, ...]) -> None:
        """Keep the documents, as the port requires."""
        for document in documents:
            replace_file(self._folder / f"{document.name}.document", document.data)
        versions = self.versions() | {one.name: one.version for one in documents}
        replace_file(self._folder / VERSIONS_NAME, json.dumps(versions).encode())
        if any(document.name == CONSUMERS for document in documents):
            # The leader's consumers are the stream's. This home's own are from a time when it led.
            shutil.rmtree(self._home.delivery_folder(self._name), ignore_errors=True)

    def forget_documents(self) -> None:
        """Delete all kept documents."""
        (self._folder / VERSIONS_NAME).unlink(missing_ok=True)
        for document in self._folder.glob("*.document"):
            document.unlink()

    def set_aside(self, behind: GroupNumber) -> None:
        """Set the tail aside, as the port requires: into a folder that is a readable log of its own."""
        files, folder = RealFiles(), str(self._wal_folder)
        # Named by the promise, not by the time: an interrupted call is repeated. Two homes promoted with
        # the same number may both have had this node follow.
        promise = self._roles.of(self._name).promise
        of = f"{promise.epoch}-{promise.node}" if promise.node else f"{promise.epoch}"
        aside = self._folder / f"aside-behind-{behind}-for-{of}"
        found = truncate_to(folder, ends_behind(files, folder, behind), aside=str(aside), files=files)
        (self._wal_folder / SESSIONS_NAME).unlink(missing_ok=True)
        if found is None:
            return
        self._forget_sessions(found.first_seq)
        logger.warning(
            "set aside what the leader doesn't have", stream=self._name, folder=found.folder, bytes=found.size_bytes
        )
        self._report(found)

    def _forget_sessions(self, first: Seq) -> None:
        """Drop the sessions document if it covers the tail set aside: other writes will get those numbers."""
        data = self.document(SESSIONS)
        if data is None or (covered_in(data) or Seq(0)) < first:
            return
        versions = self.versions()
        versions.pop(SESSIONS, None)
        replace_file(self._folder / VERSIONS_NAME, json.dumps(versions).encode())
        (self._folder / f"{SESSIONS}.document").unlink(missing_ok=True)

    def report_what_was_set_aside(self) -> None:
        """Write missing reports.

        One is missing if the process was killed after it had set a tail aside, and another node has been promoted
        since.
        """
        for aside in sorted(self._folder.glob("aside-behind-*")):
            if aside.name.endswith(REPORT_SUFFIX) or (aside.with_name(aside.name + REPORT_SUFFIX) / REPORT).exists():
                continue
            found = found_aside(RealFiles(), str(aside))
            if found is not None:
                self._report(found)

    def _report(self, found: SetAsideTail) -> None:
        try:
            report = write_report(self._name, found, Path(found.folder + REPORT_SUFFIX))
        except (MillstreamError, OSError) as error:
            logger.warning("the report of what was set aside couldn't be written", stream=self._name, error=str(error))
        else:
            logger.warning("its records stand in a report", stream=self._name, folder=str(report))

    def lag(self, lag: Lag) -> None:
        """Note the lag, as the port requires."""
        note_age(self._folder, None if lag.age_s == float("inf") else lag.age_s)

    def let_go(self, leader_dropped: Seq) -> None:
        """Drop old segments, as the port requires."""
        self._retention.look(leader_dropped)
