"""Every state that a few writers, a store and a reader can reach, and the invariants of each state.

The machines are the real ones. This module plays the world around them: a network that loses and delays
replies, processes that die, hang and return, and logs that keep a group or lose it. It also records the
true state of each number, whichever process knows it:

asked -> held by a process -> written in the writer's log -> settled: shown to readers, or never to be

A settled range is forgotten; a process that touches it again breaks a promise.

`run` plays all orders of all steps from the empty stream, breadth first, and checks each state that it
meets once.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from millstream.errors import StaleEpoch
from millstream.model.ids import Epoch, WriterId
from millstream.model.positions import Seq, SeqRange, StreamToken
from millstream.protocol.sequencer import Ledger, LedgerView, Registration, WriterNumbers, WriterPhase
from millstream.protocol.sequencer.persisted_upto import InFlight

ASKED, HELD, WRITTEN, SETTLED = "asked", "held", "written", "settled"
HERE = "home"


class Violation(AssertionError):
    """An invariant that doesn't hold; `trace` lists the steps that led there."""

    def __init__(self, what: str, trace: tuple[str, ...] = ()) -> None:
        super().__init__(f"{what}\n  " + "\n  ".join(trace))
        self.what = what


class Ask(NamedTuple):
    """A draw without a reply: the range that it was given, if any, and whether the connection is gone."""

    given: SeqRange | None
    lost: bool


class Process(NamedTuple):
    """One incarnation of a writer."""

    epoch: Epoch
    is_open: bool
    numbers: Any
    """`WriterNumbers`, frozen; None before it is open."""
    ask: Ask | None


class Truth(NamedTuple):
    """The true state of one range, whichever process knows it."""

    given: SeqRange
    writer: WriterId
    epoch: Epoch
    state: str


class Budget(NamedTuple):
    """How often rare events may still happen."""

    starts: int
    """Number of process starts, restarts included."""
    kills: int = 0
    takeovers: int = 0
    losses: int = 0
    """Number of replies lost."""
    late: int = 0
    """Number of draws that are executed after their sender gave up on them."""
    forgets: int = 0


@dataclass(frozen=True, slots=True)
class Scope:
    """The size of the world to play."""

    writers: int
    numbers: int
    budget: Budget
    in_flight: int = 1
    counts: tuple[int, ...] = (1,)
    eager: bool = False
    """Whether writers report after each step, and never later. A late report states less, so reporting at
    once gives no lower cut.
    """


class World(NamedTuple):
    """One state. `processes` and `takeovers` are by writer; a writer may have a hung incarnation and a new one."""

    ledger: Ledger
    processes: tuple[tuple[Process, ...], ...]
    takeovers: tuple[Registration | None, ...]
    late: tuple[tuple[WriterId, Epoch, Seq], ...]
    """Draws whose sender gave up on them, and which the store hasn't executed yet."""
    truth: tuple[Truth, ...]
    left: Budget
    given_to: Seq = Seq(0)
    ends: frozenset[Seq] = frozenset()
    """Ends of the ranges that were given."""
    shown: tuple[tuple[SeqRange, WriterId], ...] = ()
    """Ranges that readers can read, in the order in which they were shown. They don't distinguish states."""

    def key(self) -> object:
        """A key that is equal for equal states."""
        return (
            (self.ledger, self.processes, self.takeovers, self.late, self.truth),
            self.left,
            self.ends,
        )


def _freeze(machine: WriterNumbers) -> Any:
    return tuple((name, _plain(value)) for name, value in vars(machine).items())


@cache
def _numbers(frozen: Any, step: str, *arguments: Any) -> tuple[Any, Any]:
    """Return the result of a step of `WriterNumbers`, and the numbers after it: few of them, met again and again."""
    numbers: WriterNumbers = _thaw(WriterNumbers, frozen)
    returned = getattr(numbers, step)(*arguments)
    return returned, _freeze(numbers)


@cache
def _position(frozen: Any) -> Seq:
    numbers: WriterNumbers = _thaw(WriterNumbers, frozen)
    return numbers.position


@cache
def _in_flight(frozen: Any) -> int:
    numbers: WriterNumbers = _thaw(WriterNumbers, frozen)
    return len(numbers._in_flight)


@cache
def _cut(ledger: Ledger) -> StreamToken:
    """Return the token up to which a reader that asks the store now may read."""
    return token_of(ledger.view(0))


def token_of(view: LedgerView) -> StreamToken:
    """Return the token of a view: the cut of linear readers, and each writer's position."""
    return StreamToken("00000000", view.persisted_upto, view.positions)


@cache
def _ledger(ledger: Ledger, step: str, *arguments: Any, **named: Any) -> Any:
    """Return the result of a step of the ledger, or None if the incarnation is fenced."""
    try:
        return getattr(ledger, step)(*arguments, **named)
    except StaleEpoch:
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, InFlight):
        return ("in flight", tuple(value._given), frozenset(value._open))
    return value


def _thaw(kind: Any, frozen: Any) -> Any:
    machine = object.__new__(kind)
    for name, value in frozen:
        setattr(machine, name, _full(value))
    return machine


def _full(value: Any) -> Any:
    if isinstance(value, tuple) and value and value[0] == "in flight":
        made = InFlight()
        made._given, made._open = deque(value[1]), set(value[2])
        return made
    return value


def begin(scope: Scope) -> World:
    """Return the world of an empty stream in which no process runs."""
    return World(
        Ledger(),
        ((),) * scope.writers,
        (None,) * scope.writers,
        (),
        (),
        scope.budget,
    )


def steps(world: World, scope: Scope) -> Iterator[tuple[str, World]]:
    """Yield every step that the world may take next, with the world after it."""
    for place in range(scope.writers):
        yield from _writer_steps(world, scope, place)
    yield from _late_draws(world)


def _writer_steps(world: World, scope: Scope, place: int) -> Iterator[tuple[str, World]]:
    writer = _id(world, place)
    name = f"w{place}"
    entry = None if writer is None else world.ledger.entry(writer)
    running = world.processes[place]
    if world.left.starts and len(running) < 2 and place <= len(world.ledger.writers):
        ledger, registered = _ledger(world.ledger, "register", name, HERE, now_us=0, lease_us=0)
        started = (*running, Process(registered.epoch, is_open=False, numbers=None, ask=None))
        yield f"{name} registers", _put(_spend(world, starts=1), place, started)._replace(ledger=ledger)
    if writer is None or entry is None:
        return
    for index, process in enumerate(running):
        who = f"{name} (epoch {process.epoch})"
        for said, after in _process_steps(world, scope, place, index):
            yield f"{who} {said}", after
        if world.left.kills:
            yield f"{who} is killed", _die(_spend(world, kills=1), place, index)
    if world.left.takeovers and entry.phase is not WriterPhase.SETTLED and world.takeovers[place] is None:
        ledger, taken = _ledger(world.ledger, "take_over", writer, now_us=0, lease_us=0)
        takeovers = _with(world.takeovers, place, taken)
        yield f"{name} is taken over", _spend(world, takeovers=1)._replace(ledger=ledger, takeovers=takeovers)
    taken = world.takeovers[place]
    if taken is not None:
        without = world._replace(takeovers=_with(world.takeovers, place, None))
        if world.left.kills:
            yield f"who took {name} over dies", _spend(without, kills=1)
        recovered = _recovered(without, place, taken.epoch)
        ledger = _ledger(recovered.ledger, "settle", writer, taken.epoch)
        if ledger is None:
            yield f"who recovered {name}'s log is fenced", recovered
        else:
            yield f"{name}'s log is recovered for it", recovered._replace(ledger=ledger)
    if world.left.forgets and entry.phase is not WriterPhase.SETTLED and not running and taken is None:
        ledger = _ledger(world.ledger, "forget", writer, now_us=0)
        cut_at = ledger.entry(writer).cut_at
        truth = tuple(t for t in world.truth if not (t.writer == writer and t.given.first > cut_at))
        yield f"{name} is forgotten", _spend(world, forgets=1)._replace(ledger=ledger, truth=truth)


def _process_steps(world: World, scope: Scope, place: int, index: int) -> Iterator[tuple[str, World]]:
    process = world.processes[place][index]
    writer = _id(world, place)
    assert writer is not None
    if not process.is_open:
        others = [other for at, other in enumerate(world.processes[place]) if at != index]
        if others:
            return  # another process has the shards' locks
        recovered = _recovered(world, place, process.epoch, but=index)
        told = _ledger(recovered.ledger, "recovered", writer, process.epoch, now_us=0, lease_us=0)
        if told is None:
            yield "has recovered, is fenced and ends", _die(recovered, place, index)
            return
        ledger, floor = told[0], told[1].given.last
        opened = process._replace(is_open=True, numbers=_freeze(WriterNumbers(writer, process.epoch, floor)))
        yield "has recovered", _change(recovered, place, index, opened)._replace(ledger=ledger)
        return
    ask = process.ask
    mine = [t for t in world.truth if t.writer == writer and t.epoch == process.epoch]
    if ask is None and _in_flight(process.numbers) < scope.in_flight:
        yield from _draws(world, scope, place, index)
    elif ask is not None and not ask.lost:
        assert ask.given is not None
        _, numbers = _numbers(process.numbers, "given", ask.given)
        after = _mark(world, ask.given, HELD)
        yield "hears what it was given", _change(after, place, index, process._replace(numbers=numbers, ask=None))
        if world.left.losses:
            lost = process._replace(ask=ask._replace(lost=True))
            yield "loses the reply", _change(_spend(world, losses=1), place, index, lost)
    elif ask is not None:
        yield from _resolves(world, place, index)
    yield from _ends(world, place, index, mine)
    if not scope.eager:
        yield from _reports(world, place, index)
    if ask is None and not [t for t in mine if t.state in (HELD, WRITTEN)]:
        ledger = _ledger(world.ledger, "settle", writer, process.epoch)
        if ledger is not None:
            closed = _put(world, place, _without(world.processes[place], index))
            yield "closes", closed._replace(ledger=ledger)


def _ends(world: World, place: int, index: int, mine: list[Truth]) -> Iterator[tuple[str, World]]:
    """Yield the steps that a process may take with the ranges that it holds."""
    process = world.processes[place][index]
    for truth in mine:
        first = truth.given.first
        if truth.state == HELD:
            yield f"writes {first}", _mark(world, truth.given, WRITTEN)
        if truth.state in (HELD, WRITTEN):
            _, numbers = _numbers(process.numbers, "abort" if truth.state == HELD else "finish", truth.given)
            after = _change(_mark(world, truth.given, SETTLED), place, index, process._replace(numbers=numbers))
            if truth.state == HELD:
                yield f"gives up {first}", after
            else:
                yield (
                    f"has {first} durable, and shows it",
                    after._replace(shown=(*world.shown, (truth.given, truth.writer))),
                )


def _reports(world: World, place: int, index: int) -> Iterator[tuple[str, World]]:
    """Yield the steps in which a process reports its position to the store, and learns the others' positions."""
    process = world.processes[place][index]
    writer = _id(world, place)
    assert writer is not None
    position = _position(process.numbers)
    reported = _ledger(world.ledger, "report", writer, process.epoch, position=position, now_us=0, lease_us=0)
    if reported is None:
        return
    ledger, view = reported
    if process.ask is not None:
        if ledger != world.ledger:
            yield "reports meanwhile", world._replace(ledger=ledger)
        return
    _, numbers = _numbers(process.numbers, "observe", view.newest)
    if ledger == world.ledger and numbers == process.numbers:
        return
    yield "reports", _change(world, place, index, process._replace(numbers=numbers))._replace(ledger=ledger)


def all_report(world: World) -> World:
    """Let every open process report its position to the store twice: the second report has what the first learnt."""
    for _ in range(2):
        before = world
        for place, running in enumerate(world.processes):
            for index, process in enumerate(running):
                if process.is_open:
                    world = next((after for _, after in _reports(world, place, index)), world)
        if world is before:
            break
    return world


def _draws(world: World, scope: Scope, place: int, index: int) -> Iterator[tuple[str, World]]:
    """Yield the steps in which a draw is asked for and executed, or is lost on the way."""
    process = world.processes[place][index]
    writer = _id(world, place)
    assert writer is not None
    position, numbers = _numbers(process.numbers, "asks")
    asking = process._replace(numbers=numbers)
    if world.left.losses:
        lost = _change(_spend(world, losses=1), place, index, asking._replace(ask=Ask(None, lost=True)))
        yield "asks for numbers, which is lost", lost
        if world.left.late:
            late = (*world.late, (writer, process.epoch, position))
            yield "asks for numbers, which is late", _spend(lost, late=1)._replace(late=late)
    for count in scope.counts:
        if world.ledger.newest + count > scope.numbers:
            continue
        drawn = _ledger(world.ledger, "draw", writer, process.epoch, count, position=position, now_us=0, lease_us=0)
        if drawn is None:
            yield "asks for numbers, is fenced, and ends", _die(world, place, index)
            return
        ledger, given = drawn[0], drawn[1].given
        after = _give(world._replace(ledger=ledger), given, writer, process.epoch, ASKED)
        yield (
            f"asks for {count} and is given them",
            _change(after, place, index, asking._replace(ask=Ask(given, lost=False))),
        )


def _resolves(world: World, place: int, index: int) -> Iterator[tuple[str, World]]:
    """Yield the steps in which a writer asks the store for a draw whose reply was lost."""
    process = world.processes[place][index]
    writer = _id(world, place)
    assert writer is not None
    entry = world.ledger.entry(writer)
    if entry.epoch != process.epoch:
        yield "is fenced, and ends", _die(world, place, index)
        return
    found, numbers = _numbers(process.numbers, "resolved", entry.last)
    after = _change(world, place, index, process._replace(numbers=numbers, ask=None))
    yield "asks what it was given", after if found is None else _mark(after, found, HELD)


def _late_draws(world: World) -> Iterator[tuple[str, World]]:
    for at, (writer, epoch, position) in enumerate(world.late):
        after = world._replace(late=_without(world.late, at))
        drawn = _ledger(after.ledger, "draw", writer, epoch, 1, position=position, now_us=0, lease_us=0)
        if drawn is None:
            yield "a late draw is refused", after
            continue
        ledger, given = drawn[0], drawn[1].given
        if ledger.newest > 4:
            continue
        yield "a late draw is executed", _give(after._replace(ledger=ledger), given, writer, epoch, ASKED)


def _recovered(world: World, place: int, epoch: Epoch, *, but: int | None = None) -> World:
    """Read the log to its end, as a process that made sure that no writer writes it.

    Written ranges are kept, or were torn.
    """
    writer = _id(world, place)
    for index in reversed(range(len(world.processes[place]))):
        if index != but:
            world = _die(world, place, index)
    found = tuple(t for t in world.truth if t.writer == writer and t.state == WRITTEN and t.epoch < epoch)
    entry = None if writer is None else world.ledger.entry(writer)
    cut_at = None if entry is None else entry.cut_at
    kept = tuple((t.given, t.writer) for t in found if cut_at is None or t.given.first <= cut_at)
    return world._replace(truth=tuple(t for t in world.truth if t not in found), shown=(*world.shown, *kept))


def _die(world: World, place: int, index: int) -> World:
    """Remove a process, with everything that only its memory held or that only it was to receive."""
    process = world.processes[place][index]
    writer = _id(world, place)
    truth = tuple(
        t for t in world.truth if not (t.writer == writer and t.epoch == process.epoch and t.state in (ASKED, HELD))
    )
    return _put(world, place, _without(world.processes[place], index))._replace(truth=truth)


def _spend(world: World, **spent: int) -> World:
    left = {name: getattr(world.left, name) - count for name, count in spent.items()}
    return world._replace(left=world.left._replace(**left))


# --- small changes ---------------------------------------------------------------------------------------------------


def _id(world: World, place: int) -> WriterId | None:
    name = f"w{place}"
    return next((entry.writer for entry in world.ledger.writers if entry.name == name), None)


def _with(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    return (*items[:at], item, *items[at + 1 :])


def _without(items: tuple[Any, ...], at: int) -> tuple[Any, ...]:
    return (*items[:at], *items[at + 1 :])


def _put(world: World, place: int, processes: tuple[Process, ...]) -> World:
    return world._replace(processes=_with(world.processes, place, processes))


def _change(world: World, place: int, index: int, process: Process) -> World:
    return _put(world, place, _with(world.processes[place], index, process))


def _give(world: World, given: SeqRange, writer: WriterId, epoch: Epoch, state: str) -> World:
    if given.last != world.ledger.newest or given.first <= world.given_to:
        raise Violation(f"{given} was given twice")
    return world._replace(
        truth=(*world.truth, Truth(given, writer, epoch, state)),
        given_to=given.last,
        ends=world.ends | {given.last},
    )


def _mark(world: World, given: SeqRange, state: str) -> World:
    if not any(t.given == given for t in world.truth):
        raise Violation(f"{given} was settled, and is {state} now")
    truth = tuple(t._replace(state=state) if t.given == given else t for t in world.truth)
    return world._replace(truth=tuple(t for t in truth if t.state != SETTLED))


# --- what must hold ----------------------------------------------------------------------------------------------------


def check_step(before: World, after: World) -> None:
    """Raise `Violation` if a step did what no step may do."""
    if not _cut(before.ledger) <= _cut(after.ledger):
        raise Violation(f"the store's cut went back from {_cut(before.ledger)} to {_cut(after.ledger)}")


def undecided(world: World) -> Iterator[Truth]:
    """Yield the ranges that may still become readable, and aren't."""
    for truth in world.truth:
        if truth.state != ASKED or _can_be_heard_of(world, truth):
            yield truth


def _can_be_heard_of(world: World, truth: Truth) -> bool:
    place = next(p for p in range(len(world.processes)) if _id(world, p) == truth.writer)
    for process in world.processes[place]:
        if process.epoch == truth.epoch:
            if process.ask is not None and process.ask.given == truth.given and not process.ask.lost:
                return True
            entry = world.ledger.entry(truth.writer)
            if entry.epoch == truth.epoch and process.ask is not None:
                # The process lost a reply, or will have lost one: it asks for the newest range that
                # it was given.
                found, _ = _numbers(process.numbers, "resolved", entry.last)
                return bool(found == truth.given)
    return False


def check(world: World) -> None:
    """Check every invariant of a state; raise `Violation` if one is broken."""
    open_ranges = list(undecided(world))
    token = _cut(world.ledger)
    upto = token.minimum
    if upto > world.ledger.newest:
        raise Violation(f"readers may read to {upto}, and only {world.ledger.newest} were given")
    for truth in open_ranges:
        if truth.given.first <= max(upto, token.of(truth.writer)):
            raise Violation(f"readers may read to {token}, and {truth} is undecided")
    if upto and upto not in world.ends:
        raise Violation(f"readers may read to {upto}, inside of a range")
    everyone_told = not world.late and all(
        len(processes) <= 1 and all(p.is_open and p.ask is None for p in processes) for processes in world.processes
    )
    if everyone_told and not open_ranges:
        _check_that_it_catches_up(world)


def _check_that_it_catches_up(world: World) -> None:
    """Check that two reports of each writer let all readers pass.

    This holds if every writer that isn't settled is alive and has nothing to do.
    """
    ledger = world.ledger
    for entry in ledger.writers:
        if entry.phase is WriterPhase.SETTLED:
            continue
        place = int(entry.name[1:])
        live = [p for p in world.processes[place] if p.epoch == entry.epoch]
        if not live:
            return  # a dead writer waits for its recovery
        numbers = live[0].numbers
        for _ in range(2):
            position = _position(numbers)
            ledger, view = _ledger(ledger, "report", entry.writer, entry.epoch, position=position, now_us=0, lease_us=0)
            _, numbers = _numbers(numbers, "observe", view.newest)
    if ledger.view(0).persisted_upto != ledger.newest:
        raise Violation(f"all are idle and have reported, and persisted_upto stays at {ledger.view(0).persisted_upto}")


def run(scope: Scope, *, states_max: int | None = None) -> tuple[int, int]:
    """Play a scope whole, or up to a number of states.

    Returns:
        The numbers of states and steps played.

    Raises:
        Violation: with the way to it, a shortest one.
    """
    start = begin(scope)
    gc.disable()  # the search makes no reference cycles, and looking for them takes most of the time
    try:
        return _run(start, scope, states_max)
    finally:
        gc.enable()


def _run(start: World, scope: Scope, states_max: int | None) -> tuple[int, int]:
    seen: dict[object, tuple[object | None, str]] = {start.key(): (None, "")}
    queue = deque([(start, start.key())])
    played = 0
    while queue and (states_max is None or len(seen) < states_max):
        world, key = queue.popleft()
        said = "?"
        try:
            for said, after in steps(world, scope):
                played += 1
                check_step(world, after)
                if scope.eager:
                    after = all_report(after)  # noqa: PLW2901 - the step and what follows it are one
                found, known = after.key(), len(seen)
                seen.setdefault(found, (key, said))  # hashed once, which takes a good part of the time
                if len(seen) > known:
                    check(after)
                    queue.append((after, found))
        except Violation as error:
            raise Violation(error.what, (*_way(seen, key), said)) from None
        except AssertionError as error:
            raise Violation(f"an assertion failed: {error}", (*_way(seen, key), said)) from error
    return len(seen), played


def _way(seen: dict[object, tuple[object | None, str]], key: object | None) -> tuple[str, ...]:
    said: list[str] = []
    while key is not None:
        key, one = seen[key]
        said.append(one)
    return tuple(reversed([one for one in said if one]))
