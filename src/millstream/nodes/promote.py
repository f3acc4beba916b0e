"""`promote`: carries out the decisions of `protocol.replication.Promotion`, in a process of its own.

No other process follows or writes here during that time.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from millstream.errors import (
    CatalogError,
    Fenced,
    LogError,
    MillstreamError,
    NodeNameTaken,
    ReplicationError,
    UnknownStream,
    UsageError,
)
from millstream.leadership.known_leaders import note_leaders
from millstream.leadership.node_calls import NodeState, ask_promise, state_of_peer, this_node
from millstream.leadership.node_roles import Roles
from millstream.leadership.promotion_check import hear_of_promotions, two_leaders
from millstream.model.ids import Epoch, GroupNumber, StreamId
from millstream.model.replication import AckKind, NodeName
from millstream.nodes.catalog_document import CATALOG, adopt_catalog
from millstream.nodes.consumers_document import take_consumers
from millstream.nodes.follower_process import make_follower
from millstream.nodes.follower_state import FollowerState
from millstream.nodes.level_document import LEVEL, Terms
from millstream.nodes.peer_requests import node_state, wait_for_writer
from millstream.private_files import replace_file
from millstream.processes.role_locks import RoleLock, once_let_go
from millstream.protocol.replication import promotion_machine as promoting
from millstream.protocol.replication.leader_events import PersistRole
from millstream.protocol.replication.node_promises import (
    CONSUMERS,
    CONSUMERS_KEY,
    SESSIONS,
    Promise,
    Role,
    RoleFact,
    name_taken,
)
from millstream.wal.files import RealFiles
from millstream.wal.layout import SESSIONS_NAME
from millstream.wal.replica.prepare_promotion import prepare_promotion
from millstream.wal.replica.ship_source import durable_marks
from millstream.workers import watching
from millstream.writers.stream_writer import resolve_stream, take_over

if TYPE_CHECKING:
    from millstream.home.home import Home
    from millstream.home.paths import HomePaths
    from millstream.replication.follower import WalFollower

_SURVEYS_S: Final = 5.0
_PROMISES_S: Final = 15.0
"""Time for a promise: a leader ends its writes before it answers."""
_COMES_WITHIN_S: Final = 15.0
"""Longest silence of the node that has more: longer than a stalled link lasts until it is replaced."""
_TICK_S: Final = 0.1
_STEPS_ASIDE_S: Final = 15.0
"""Time for the follower here to see that this node is promoted: it may look for its leader for seconds."""


@dataclass(frozen=True, slots=True)
class Promoted:
    """The outcome for one stream."""

    stream: str
    epoch: Epoch
    group: GroupNumber
    """The last commit group that this node continues after."""
    losses: tuple[str, ...]
    """The possible losses, if they were accepted."""
    seconds: float


def promote(
    home: Home, stream: str, *, accept_loss: bool = False, tell: Callable[[str], None] = lambda _: None
) -> Promoted:
    """Make this node the leader of a stream that it follows, or has led.

    Args:
        accept_loss: promote even if something acknowledged may be lost; the result lists it.

    Raises:
        UnknownStream, ConfigError: there is no such stream, or the configuration names no nodes.
        ReplicationError (`two_leaders`): this node leads, and has never followed the other node that does.
        ReplicationError (`not_caught_up`): too few nodes answer, or one has more that can't be fetched; this node goes on as it
            was.
        ReplicationError (`promotion_lost`): another node is being promoted, or was.
        NodeNameTaken: another home of this node's name is.
        HomeBusy: another promotion goes on here; or the writer here doesn't end.
        CatalogError, StoreUnavailable …: this node can't take over; nothing is lost, and it can be
            retried.
    """
    if stream not in home.config.streams:
        raise UnknownStream(f"no stream {stream} in {home.config_file}", stream=stream)
    began_s = time.monotonic()
    me = this_node(home)
    home.prepare()
    with contextlib.ExitStack() as held:
        # The follower here sees this lock, and steps aside while it is held.
        held.enter_context(RoleLock.take(home.run_folder, "promote", stream=stream))
        _refuse_two_leaders(home, stream)
        attempt = _Attempt(home, stream, me, accept_loss=accept_loss, tell=tell)
        fact, losses = attempt.run()
        note_leaders(home, stream)
    return Promoted(stream, fact.promise.epoch, fact.lineage.last.behind, losses, time.monotonic() - began_s)


class _Attempt:
    """One promotion, on the caller's thread; other nodes are asked concurrently."""

    def __init__(
        self, home: Home, stream: str, me: NodeName, *, accept_loss: bool, tell: Callable[[str], None]
    ) -> None:
        self._home = home
        self._stream = stream
        self._tell = tell
        self._roles = Roles(home)
        terms, has_store = self._terms()
        nodes = terms.nodes | {me}
        _refuse_several_writers(home, stream)
        self._machine = promoting.Promotion(
            me,
            nodes,
            self._roles.of(stream),
            terms.level,
            has_store=has_store,
            accept_loss=accept_loss,
            answer_s=_PROMISES_S,
        )
        self._asking = ThreadPoolExecutor(max(1, len(nodes)), thread_name_prefix="promote")
        self._asked: set[Future[promoting.Event]] = set()
        self._absent: set[NodeName] = set()
        """Nodes that didn't answer the state request: they get less time to promise."""
        self._error: MillstreamError | None = None
        self._lead: promoting.Lead | None = None
        self._claimant: Final = secrets.token_hex(8)
        """Distinguishes this attempt from one of a home with the same name."""

    def _terms(self) -> tuple[Terms, bool]:
        """Return the terms of acknowledged writes, and whether a store decides.

        The leader has sent its terms; this node's configuration may differ.
        """
        own = Terms.configured(self._home, self._stream)
        sent = FollowerState(self._home, self._stream).document(LEVEL)
        its = own if sent is None else Terms.from_json(sent)
        if its.level != own.level:
            self._tell(f"the leader has acknowledged at {its.level}, and this node is configured for {own.level}")
        if its.nodes != own.nodes:
            self._tell(
                f"the leader counts the nodes {', '.join(sorted(its.nodes))}; here are {', '.join(sorted(own.nodes))}"
            )
        stores = AckKind.OBJECT in {own.level.kind, its.level.kind}
        return own.with_leaders(its), stores or self._home.config.replication.object_store is not None

    def run(self) -> tuple[RoleFact, tuple[str, ...]]:
        try:
            self._step(promoting.BeginPromotion())
            while self._lead is None and self._error is None:
                done, self._asked = wait(self._asked, timeout=_TICK_S, return_when="FIRST_COMPLETED")
                for answer in done:
                    self._step(answer.result())
                if not self._asked:
                    time.sleep(_TICK_S)  # an answer that doesn't count is waited for until time is up
                self._step(promoting.Tick())
        finally:
            self._asking.shutdown(wait=False, cancel_futures=True)
        if self._error is not None:
            raise self._error
        assert self._lead is not None, "it ends in one of the two"
        return self._lead.fact, self._lead.losses

    def _step(self, event: promoting.Event) -> None:
        events = [event]
        while events:
            for effect in self._machine.step(events.pop(0), time.monotonic()):
                found = self._carry_out(effect)
                if found is not None:
                    events.append(found)

    def _carry_out(self, effect: promoting.Effect) -> promoting.Event | None:
        match effect:
            case promoting.Survey(node):
                self._asked.add(self._asking.submit(self._survey, node))
            case promoting.AskPromise(node, promise):
                self._asked.add(self._asking.submit(self._ask, node, promise))
            case promoting.BecomeCandidate(promise):
                return self._stand(promise)
            case PersistRole(fact):
                with self._roles.changing(self._stream) as changing:
                    if changing.fact.promise > fact.promise:
                        return promoting.Superseded(changing.fact.promise)
                    changing.put(fact)
            case promoting.Claim(promise):
                return self._claim(promise)
            case promoting.CatchUp(node):
                return self._catch_up(node)
            case promoting.TakeOverLog():
                return promoting.LogTakenOver(self._take_over())
            case promoting.Lead():
                self._lead = effect
            case promoting.Failed(error):
                self._error = error
        return None

    # --- others

    def _survey(self, node: NodeName) -> promoting.Event:
        try:
            state = state_of_peer(self._home, node, self._stream, timeout_s=_SURVEYS_S)
        except MillstreamError as error:
            self._tell(f"{node} doesn't answer: {error.message}")
            self._absent.add(node)
            return promoting.Unanswered(node)
        return promoting.Answered(node, _report(state))

    def _ask(self, node: NodeName, promise: Promise) -> promoting.Event:
        timeout_s = _SURVEYS_S if node in self._absent else _PROMISES_S
        try:
            state = ask_promise(self._home, node, self._stream, promise, self._claimant, timeout_s=timeout_s)
        except Fenced as error:
            higher = Promise(Epoch(int(error.details.get("epoch", 0))), NodeName(str(error.details.get("leader", ""))))
            return promoting.Superseded(higher)
        except NodeNameTaken as error:
            return promoting.Refused(node, error)
        except MillstreamError as error:
            self._tell(f"{node} doesn't promise: {error.message}")
            return promoting.Unanswered(node)
        self._tell(f"{node} has promised, and has group {state.group}")
        return promoting.Answered(node, _report(state))

    def _claim(self, promise: Promise) -> promoting.Event:
        from millstream.nodes.object_stores import store_of, stored_lineage

        try:
            with contextlib.closing(store_of(self._home, self._stream)) as store:
                if not store.claim(promise.epoch, promise.node, self._claimant):
                    holder = store.holder_of(promise.epoch)
                    lost = ReplicationError(
                        f"epoch {promise.epoch} was claimed by {holder or 'another node'}", code="promotion_lost"
                    )
                    return promoting.ClaimFailed(name_taken(promise) if holder == promise.node else lost)
                rank, _, persisted_upto = stored_lineage(store)
                return promoting.Claimed(rank, persisted_upto)
        except MillstreamError as error:
            return promoting.ClaimFailed(error)

    def _catch_up(self, node: NodeName) -> promoting.Event:
        """Follow a node that has promised until everything that it has is here."""
        self._tell(f"takes what it lacks from {node or 'the object store'}")
        try:
            fact = self._roles.of(self._stream)
            notes = FollowerState(self._home, self._stream)
            if node == promoting.STORE:
                return self._fill()
            follower = once_let_go(
                lambda: make_follower(self._home, self._stream, fact, notes=notes, only=node), _STEPS_ASIDE_S
            )
            with watching("promote-watch", _TICK_S, _progress_watch(follower)) as silent:
                follower.run(silent, until_caught_up=True)
        except MillstreamError as error:
            self._tell(f"{node} can't be followed: {error.message}")
            return promoting.CatchUpFailed(error)
        return promoting.CaughtUp(self._roles.of(self._stream), node_state(self._home, self._stream).group)

    def _fill(self) -> promoting.Event:
        """Fetch what the object store has and this node lacks."""
        from millstream.nodes.fill_from_store import fill
        from millstream.nodes.object_stores import store_of

        with contextlib.closing(store_of(self._home, self._stream)) as store:
            once_let_go(lambda: fill(self._home, self._stream, store, tell=self._tell), _STEPS_ASIDE_S)
        return promoting.CaughtUp(self._roles.of(self._stream), node_state(self._home, self._stream).group)

    # --- this one

    def _stand(self, promise: Promise) -> promoting.Event:
        """BecomeCandidate once the follower or writer here has stepped aside: both check the role and the promotion's lock."""
        wait_for_writer(self._home, self._stream)
        with self._roles.changing(self._stream) as changing:
            if changing.fact.promise != self._machine.fact.promise:
                return promoting.Superseded(changing.fact.promise)
            changing.put(changing.fact.candidate_for(promise, self._claimant))
        # A follower that had just started at this process's first look only now sees the promise.
        wait_for_writer(self._home, self._stream)
        return promoting.BecameCandidate(changing.fact, node_state(self._home, self._stream).group)

    def _take_over(self) -> GroupNumber:
        """Make the leader's catalog, sessions and consumers this node's, and recover the log under a new epoch.

        From then on the log is held for its followers.
        """
        folder = self._home.wal_folder(self._stream)
        if self._machine.fact.role is Role.FOLLOWS and folder.is_dir():
            # Parts of incomplete groups: a writer's recovery would take them for damage.
            once_let_go(lambda: prepare_promotion(str(folder)), _STEPS_ASIDE_S)
        marks = durable_marks(RealFiles(), str(folder)) if folder.is_dir() else {}
        notes = FollowerState(self._home, self._stream)
        if not marks:
            return GroupNumber(0)
        stream = next(mark.stream for mark in marks.values())
        catalog = notes.document(CATALOG)
        if self._machine.fact.role is Role.FOLLOWS:
            if catalog is not None:
                adopt_catalog(self._home, catalog, [stream])
            elif self._home.catalog_address() is None and not self._has_led(stream):
                raise CatalogError(
                    f"the leader of {self._stream} has never sent its catalog here",
                    hint="Use the same PostgreSQL catalog on this node: [catalog] url.",
                )
            sessions = notes.document(SESSIONS)
            if sessions is not None:
                replace_file(folder / SESSIONS_NAME, sessions)
        # `millstream run` may be waiting for its part here. This node doesn't lead yet, so no process
        # opens the log, whose locks are taken here.
        with self._home.open_catalog() as known:
            found = resolve_stream(self._home, known, self._stream)
            assert found == stream, "the log's own stream"
            # Followers reported to an earlier leader. Under another one they may have set that aside since.
            known.hold_all_for_followers(found)
            group = take_over(
                self._home,
                known,
                found,
                self._stream,
                self._home.config.streams[self._stream],
                reserved=max(mark.reserved_to for mark in marks.values()),
            )
            consumers = notes.document(CONSUMERS)
            if self._machine.fact.role is Role.FOLLOWS and consumers is not None:
                key = notes.document(CONSUMERS_KEY)
                if not take_consumers(self._home, known, found, self._stream, consumers, key):
                    self._tell(
                        "the consumers' state that the leader has sent is damaged: run `millstream consumer repair`"
                    )
        # From here on this home's own documents are newer. Once another node leads, these would be taken
        # for that leader's.
        notes.forget_documents()
        self._tell(f"has taken over, after group {group}")
        return group

    def _has_led(self, stream: StreamId) -> bool:
        """Return whether this home's own catalog belongs to the log.

        It does if this home wrote the log and no later leader has sent another catalog, and so nothing
        else either.
        """
        with self._home.open_catalog() as known:
            return bool(known.writers(stream))


def _progress_watch(follower: WalFollower) -> Callable[[], bool]:
    """Return a check that is False after a long silence: the node that has more is gone too, which the caller learns."""
    had, since_s = (-1, -1), time.monotonic()

    def goes_on() -> bool:
        nonlocal had, since_s
        has = int(follower.group), follower.lag().size_bytes
        if has != had:
            had, since_s = has, time.monotonic()
        return time.monotonic() - since_s <= _COMES_WITHIN_S

    return goes_on


def _report(state: NodeState) -> promoting.NodeReport:
    return promoting.NodeReport(
        state.fact.promise, state.fact.role, state.rank, state.persisted_upto, state.is_candidate
    )


def _refuse_two_leaders(home: Home, stream: str) -> None:
    """Refuse if a node that never learned whom to follow also leads, alone: another promotion would hide it."""
    if not hear_of_promotions(home, stream):
        return
    for node in sorted(home.config.replication.nodes.keys() - {home.config.replication.node}):
        try:
            theirs = state_of_peer(home, node, stream, timeout_s=_SURVEYS_S).fact
        except MillstreamError:
            continue  # an unreachable node doesn't count as a leader
        if theirs.role is Role.LEADS:
            raise two_leaders(stream, node)


def _refuse_several_writers(home: HomePaths, stream: str) -> None:
    folder = home.wal_folder(stream)
    with contextlib.suppress(LogError, FileNotFoundError):
        writers = {mark.writer for mark in durable_marks(RealFiles(), str(folder)).values()}
        if len(writers) > 1:
            raise UsageError(
                f"stream {stream} has {len(writers)} writers: a node of a stream of several can't be promoted",
                hint="Start the node on which they run again; only a stream that was never written under a [writer] name can "
                "be promoted.",
            )
