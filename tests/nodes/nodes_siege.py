"""Three nodes under siege: real processes over links, with faults drawn from a seed.

Links are cut, processes killed and stopped, while clients write and leaders change. The seed decides the
faults, the machine their exact moments: a seed that has found a bug is played again and again.

    python -m tests.nodes.nodes_siege LEVEL FIRST COUNT [PROMOTIONS]
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.commands import Command
from tests.cutting import BOTH, Link, Way
from tests.nodes.nodes import STREAM, Node
from tests.seeds import Violation

import millstream
from millstream.errors import Fenced, LogError, MillstreamError, ReadOnly, SessionGap
from millstream.protocol.replication.node_promises import Role, RoleFact
from millstream.testing._servers.ports import free_port

NAMES: Final = "abc"
_SESSIONS: Final = 3
_ID_STEP: Final = 1_000_000
_TABLE_WRITES: Final = 20
"""Writes of a session before it goes on in another table: catalogs have to be where the records are."""
_BETWEEN_S: Final = 0.005
"""A client's pause between two writes."""
_APPEND_S: Final = 1.5
_PATIENCE_S: Final = 240.0
"""Time limit for events that must happen once everything was healed: other processes share the two slow cores."""
_AWAY: Final = ("dead", "stopped", "cut off", "silent")


@dataclass(frozen=True, slots=True)
class Intensity:
    """How much happens."""

    promotions: int = 2
    faults: int = 3
    """Number between two promotions."""
    pause_s: float = 0.6
    """Longest pause between two faults."""
    long_s: float = 2.0
    """Longest duration of a fault."""
    kills_promotions: float = 0.0
    """Probability that a promotion is first killed on its way."""


class Writer:
    """A client that writes in a session of its own, one write after the other.

    It sends each write again under the same number until a node acknowledges it.
    """

    def __init__(self, index: int, urls: dict[str, str], acks: str | None) -> None:
        self.index: Final = index
        self.acks: Final = acks
        self.acknowledged: Final[list[int]] = []
        self.refusals: Final[Counter[str]] = Counter()
        self.failure: BaseException | None = None
        self._incarnation = 1
        self._homes = {name: millstream.connect(url, timeout_s=_APPEND_S) for name, url in urls.items()}
        self._ending = threading.Event()
        self._giving_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"writer-{index}", daemon=True)
        self._thread.start()

    def end(self, within_s: float) -> bool:
        """Wait until the current write is acknowledged, then end; return whether it was."""
        self._ending.set()
        self._thread.join(within_s)
        was_done = not self._thread.is_alive()
        self._giving_up.set()
        self._thread.join(180)
        for home in self._homes.values():
            home.close()
        return was_done

    def id_of(self, number: int) -> int:
        """Return the id of the row in the write with that number."""
        return self.index * _ID_STEP + number

    def _run(self) -> None:
        try:
            at = NAMES[self.index % len(NAMES)]
            for number in range(1, _ID_STEP):
                at = self._write(number, at)
                if self._ending.is_set():
                    return
        except BaseException as error:  # noqa: BLE001 - told by whoever asks
            self.failure = error

    def _write(self, number: int, at: str) -> str:
        while not self._giving_up.is_set():
            try:
                self._homes[at].append(
                    STREAM,
                    f"orders_{number // _TABLE_WRITES}",
                    [{"id": self.id_of(number)}],
                    session=f"writer-{self.index}-{self._incarnation}",
                    number=number,
                    deadline_s=_APPEND_S,
                    acks=self.acks,
                )
            except SessionGap:
                # The session's last thousand writes were lost with a leader, which `local` allows: go on under
                # another name.
                self.refusals["session_gap"] += 1
                self._incarnation += 1
            except MillstreamError as error:
                self.refusals[error.code] += 1
                leader = error.details.get("leader") if isinstance(error, ReadOnly | Fenced) else None
                at = leader if leader in self._homes and leader != at else NAMES[(NAMES.index(at) + 1) % len(NAMES)]
                self._giving_up.wait(0.05)
            else:
                self.acknowledged.append(number)
                self._giving_up.wait(_BETWEEN_S)
                break
        return at


@dataclass(order=True)
class _Undo:
    at_s: float
    what: str = field(compare=False)
    call: Callable[[], None] = field(compare=False)


class Siege:
    """One play. `play` raises `Violation` if a promise is broken.

    Args:
        seed: of everything that is drawn.
        acks: the stream's acknowledgement level.
        folder: where the homes go.
        intensity: how much happens.
        tell: called with a line for each event.
    """

    def __init__(
        self,
        seed: int,
        acks: str,
        folder: Path,
        *,
        intensity: Intensity | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.story: list[str] = []
        self._seed = seed
        self._acks = acks
        self._intensity = Intensity() if intensity is None else intensity
        self._tell = tell
        self._rng = random.Random(f"{seed} {acks}")
        self._began_s = time.monotonic()
        self._folder = folder
        ports = {name: free_port() for name in NAMES}
        https = {name: free_port() for name in NAMES}
        self._between = {(x, y): Link(ports[y]) for x in NAMES for y in NAMES if x != y}
        self._to_clients = {name: Link(port) for name, port in https.items()}
        store = folder / "store"
        store.mkdir()
        more = f'object_store = "{store.as_uri()}"\n' if acks == "object" else ""
        self._nodes = {
            name: Node(
                folder / name, name, ports, acks=acks, more=more, http=https[name],
                others={other: self._between[name, other].port for other in NAMES if other != name},
            )
            for name in NAMES
        }  # fmt: skip
        self._leader = self._nodes["a"]
        self._follows: set[str] = set()
        self._down: set[tuple[str, str]] = set()
        """Processes that aren't to be started."""
        self._stopped: set[tuple[str, str]] = set()
        self._undo: list[_Undo] = []
        self._writers: list[Writer] = []
        self._seen: set[int] = set()
        """Rows that a reader has seen and that can't vanish."""
        self._accepted_loss = False
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)

    # --- the play ------------------------------------------------------------------------------------------------------

    def play(self) -> None:
        """Play all of it."""
        try:
            self._begin()
            for _ in range(self._intensity.promotions):
                for _ in range(self._rng.randint(1, self._intensity.faults)):
                    self._disturb()
                    self._pass(self._rng.uniform(0.1, self._intensity.pause_s))
                    self._read()
                self._change_leader(self._rng.choice(("planned", *_AWAY, *_AWAY)))
            for _ in range(self._rng.randint(0, self._intensity.faults)):
                self._disturb()
                self._pass(self._rng.uniform(0.1, self._intensity.pause_s))
            self._conclude()
        except AssertionError as error:
            raise Violation(f"{error}\n{self._what_happened()}") from error
        finally:
            self._end()

    def _begin(self) -> None:
        self._say(f"seed {self._seed}, {self._acks}")
        for part in ("owner", "serve"):
            self._leader.start(part)
        for name in "bc":
            self._nodes[name].start("serve")
            self._nodes[name].start("follow", "a")
            self._follows.add(name)
        urls = {name: f"http://127.0.0.1:{link.port}" for name, link in self._to_clients.items()}
        self._writers = [
            Writer(index, urls, "durable(1)" if self._acks == "local" and index == _SESSIONS - 1 else None)
            for index in range(_SESSIONS)
        ]
        self._until(lambda: all(len(one.acknowledged) > 3 for one in self._writers), "the first writes")
        for name in "bc":
            # These owners become writers if they are promoted, without a further command.
            self._nodes[name].start("owner")
        self._keeper.start()
        self._say("begins")

    def _keep(self) -> None:
        """Start again what has died, as a supervisor does."""
        while not self._over.wait(0.1):
            with self._lock:
                for node in self._nodes.values():
                    for part in ("owner", "serve", "follow"):
                        is_wanted = part != "follow" or node.name in self._follows
                        if is_wanted and (node.name, part) not in self._down and not node.runs(part):
                            if part in node.parts():
                                code = node.end(part)
                                self._say(f"{node.name} {part} has ended by itself: {code}")
                                self.counts[f"{part} ended by itself"] += 1
                            node.start(part)

    def _pass(self, seconds: float) -> None:
        """Let time pass, and undo faults whose time is over."""
        until_s = time.monotonic() + seconds
        while True:
            now_s = time.monotonic()
            for undo in sorted(one for one in self._undo if one.at_s <= now_s):
                self._undo.remove(undo)
                undo.call()
                self._say(f"over: {undo.what}")
            if now_s >= until_s:
                return
            self._over.wait(min(0.05, until_s - now_s))

    def _until(self, condition: Callable[[], object], what: str, within_s: float = _PATIENCE_S) -> None:
        deadline_s = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline_s, f"{what} doesn't come"
            self._pass(0.05)

    # --- faults ----------------------------------------------------------------------------------------------------------

    def _disturb(self) -> None:
        rng = self._rng
        node = self._leader if rng.random() < 0.5 else self._nodes[rng.choice(NAMES)]
        part = rng.choice(("owner", "serve") if node is self._leader else ("serve", "follow"))
        other = rng.choice([name for name in NAMES if name != node.name])
        seconds = rng.uniform(0.2, self._intensity.long_s)
        links = self._links_of(node.name, rng.choice((other, None)), both=rng.random() < 0.7)
        kind = rng.choice(("kill", "kill", "stop", "stop", "cut", "silence", "half silence", "delay", "no clients"))
        with self._lock:
            match kind:
                case "kill" if node.runs(part):
                    self._kill(node, part, seconds)
                case "stop" if node.runs(part):
                    self._stop(node, part, seconds)
                case "cut":
                    self._on(links, lambda link: link.cut(), f"{node.name} is cut ({len(links)} links)", seconds)
                case "silence":
                    self._on(links, lambda link: link.silence(), f"{node.name} is silent ({len(links)} links)", seconds)
                case "half silence":
                    ways = frozenset({rng.choice(list(Way))})
                    what = f"{node.name} is silent {min(ways)} ({len(links)} links)"
                    self._on(links, lambda link: link.silence(ways), what, seconds)
                case "delay":
                    by_s = rng.uniform(0.005, 0.1)
                    self._on(links, lambda link: link.delay(by_s), f"{node.name} is {by_s:.3f} s away", seconds)
                case "no clients":
                    to = [self._to_clients[node.name]]
                    self._on(to, lambda link: link.silence(BOTH), f"{node.name} hears no clients", seconds)
                case _:
                    return
        self.counts[kind] += 1

    def _links_of(self, name: str, other: str | None, *, both: bool) -> list[Link]:
        """Return the links from a node to another, or to all others; with `both`, also those in the other direction."""
        return [
            link
            for (x, y), link in self._between.items()
            if (x == name and other in (None, y)) or (both and y == name and other in (None, x))
        ]

    def _on(self, links: list[Link], do: Callable[[Link], None], what: str, seconds: float) -> None:
        self._say(f"{what} for {seconds:.1f} s")
        for link in links:
            do(link)

        def heal() -> None:
            for link in links:
                link.heal()

        self._undo.append(_Undo(time.monotonic() + seconds, what, heal))

    def _kill(self, node: Node, part: str, seconds: float) -> None:
        self._say(f"kills {node.name} {part} for {seconds:.1f} s")
        self._stopped.discard((node.name, part))
        self._down.add((node.name, part))
        node.end(part, signal.SIGKILL)
        again = _Undo(
            time.monotonic() + seconds, f"{node.name} {part} was dead", lambda: self._down.discard((node.name, part))
        )
        self._undo.append(again)

    def _stop(self, node: Node, part: str, seconds: float) -> None:
        self._say(f"stops {node.name} {part} for {seconds:.1f} s")
        node.signal(part, signal.SIGSTOP)
        self._stopped.add((node.name, part))
        self._undo.append(
            _Undo(time.monotonic() + seconds, f"{node.name} {part} stood still", lambda: self._go_on(node, part))
        )

    def _go_on(self, node: Node, part: str) -> None:
        if (node.name, part) in self._stopped:
            self._stopped.discard((node.name, part))
            node.signal(part, signal.SIGCONT)

    def _heal(self) -> None:
        """Undo all temporary faults."""
        for undo in sorted(self._undo):
            undo.call()
        self._undo.clear()
        self._say("all faults are over")

    # --- another leader ----------------------------------------------------------------------------------------------------

    def _change_leader(self, how: str) -> None:
        """Take the leader away, or leave it, and promote another; then the old one returns, and follows."""
        self.counts[f"leader {how}"] += 1
        old = self._leader
        self._say(f"leader {old.name} is {how}")
        back = self._take_away(old, how)
        began_s = time.monotonic()
        candidate = self._promote(old, how)
        self.counts["promotions"] += 1
        self._say(f"{candidate.name} leads, after {time.monotonic() - began_s:.1f} s")
        self._leader = candidate
        with self._lock:
            self._follows.discard(candidate.name)
        self._pass(self._rng.uniform(0.0, self._intensity.long_s))
        self._read()
        back()
        self._say(f"old leader {old.name} is back")
        self._pass(self._rng.uniform(0.0, self._intensity.pause_s))
        self._read()
        self._follow(old)

    def _take_away(self, old: Node, how: str) -> Callable[[], None]:
        """Take the node away as `how` says; return a function that brings it back."""
        parts = ("owner", "serve", "follow")
        links = self._links_of(old.name, None, both=True)
        if self._rng.random() < 0.3 and how in ("cut off", "silent"):
            links.append(self._to_clients[old.name])
        with self._lock:
            match how:
                case "dead":
                    self._down |= {(old.name, part) for part in parts}
                    self._stopped -= {(old.name, part) for part in parts}
                    old.kill()
                case "stopped":
                    self._down |= {(old.name, part) for part in parts}
                    for part in old.parts():
                        if old.runs(part):
                            old.signal(part, signal.SIGSTOP)
                            self._stopped.add((old.name, part))
                case "cut off":
                    for link in links:
                        link.cut()
                case "silent":
                    for link in links:
                        link.silence()
                case _:
                    pass

        def back() -> None:
            with self._lock:
                for link in links:
                    link.heal()
                for part in parts:
                    self._go_on(old, part)
                self._down -= {(old.name, part) for part in parts}

        return back

    def _promote(self, old: Node, how: str) -> Node:
        """Promote another node than the old leader; return once one has succeeded."""
        others = [node for node in self._nodes.values() if node is not old]
        self._rng.shuffle(others)
        deadline_s = time.monotonic() + _PATIENCE_S
        attempt = 0
        while True:
            candidate = others[attempt % 2]
            attempt += 1
            words = ["promote"]
            if self._acks == "local" and (how != "planned" or attempt > 2):
                words.append("--accept-loss")
                self._accepted_loss = True
            self._say(f"{candidate.name} {' '.join(words)}")
            if self._rng.random() < self._intensity.kills_promotions:
                self._kill_command(candidate, *words)
            done = self._asked(candidate, *words)
            for line in (done.stdout + done.stderr).splitlines():
                self._say(f"    {line}")
            if done.returncode == 0:
                return candidate
            assert "Traceback" not in done.stderr, f"promote fails:\n{done.stderr}"
            assert time.monotonic() < deadline_s, f"nobody can be promoted:\n{done.stderr}"
            self.counts["promotions refused"] += 1
            self._pass(1.0 if attempt < 3 else 3.0)

    def _asked(self, node: Node, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command, while faults go on."""
        found: list[subprocess.CompletedProcess[str]] = []
        asking = threading.Thread(target=lambda: found.append(node.ask(*words)), daemon=True)
        asking.start()
        while asking.is_alive():
            self._pass(0.1)
        return found[0]

    def _kill_command(self, node: Node, *words: str) -> None:
        """Start a command, and kill it at a random moment."""
        process = Command(["--home", str(node.home), *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._pass(self._rng.uniform(0.5, 4.0))
        process.kill()
        self._say(f"it is killed: {process.wait(180)}")
        self.counts["promotions killed"] += 1

    def _follow(self, old: Node) -> None:
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            done = self._asked(old, "follow", self._leader.name, "--only-note")
            if done.returncode == 0:
                break
            assert "Traceback" not in done.stderr, f"follow fails:\n{done.stderr}"
            assert time.monotonic() < deadline_s, f"{old.name} can't follow:\n{done.stderr}"
            self._pass(0.5)
        with self._lock:
            self._follows.add(old.name)
        self._say(f"{old.name} is to follow {self._leader.name}")

    # --- what is so --------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read as clients do: at a level that needs other nodes, rows that were read can't vanish."""
        if self._acks == "local":
            return
        for node in self._nodes.values():
            if self._acks == "object" and self._fact(node).role is not Role.LEADS:
                continue
            with contextlib.suppress(LogError, FileNotFoundError):
                self._seen.update(node.rows())
        self.counts["read"] += 1

    def _fact(self, node: Node) -> RoleFact:
        with contextlib.suppress(FileNotFoundError):
            return RoleFact.from_json((node.home / "data" / "replication" / STREAM / "role.json").read_bytes())
        return RoleFact()

    def _conclude(self) -> None:
        self._heal()
        had = [len(one.acknowledged) for one in self._writers]
        self._until(
            lambda: all(
                one.failure is not None or len(one.acknowledged) > before + 3
                for one, before in zip(self._writers, had, strict=True)
            ),
            "the writes go on",
        )
        for writer in self._writers:
            assert writer.end(_PATIENCE_S), f"writer {writer.index} isn't answered: {writer.refusals}"
            assert writer.failure is None, f"writer {writer.index} failed: {writer.failure!r}"
        self._say("writers have ended")
        nodes = list(self._nodes.values())
        first, *others = nodes

        def is_same() -> bool:
            data = first.bytes_of_log()
            return all(node.bytes_of_log() == data for node in others)

        self._until(is_same, "the same bytes everywhere")
        roles = {node.name: self._fact(node) for node in nodes}
        leads = [name for name, fact in roles.items() if fact.role is Role.LEADS]
        assert leads == [self._leader.name], f"{leads} lead: {roles}"
        self._check(self._leader.rows())
        self._check_said()

    def _check(self, rows: list[Any]) -> None:
        aside = self._set_aside()
        self.counts["records"] += len(rows)
        self.counts["set aside"] += len(aside)
        there = set(rows)
        for writer in self._writers:
            own = [row for row in rows if row // _ID_STEP == writer.index]
            assert own == sorted(set(own)), f"session {writer.index} is out of order, or has something twice: {own}"
            lacking = [number for number in writer.acknowledged if writer.id_of(number) not in there]
            self.counts["acknowledged"] += len(writer.acknowledged)
            level = writer.acks or self._acks
            if level != "local" or not self._accepted_loss:
                assert not lacking, f"writer {writer.index} lost at {level}: {lacking}"
            unreported = [number for number in lacking if writer.id_of(number) not in aside]
            assert not unreported, f"writer {writer.index} lost, and nobody reports: {unreported}"
            self.counts["lost and reported"] += len(lacking)
        vanished = sorted(self._seen - there)
        assert not vanished, f"was read and has vanished: {vanished}"

    def _set_aside(self) -> set[int]:
        """Return the ids in the reports about logs that were set aside."""
        found: set[int] = set()
        for node in self._nodes.values():
            folder = node.home / "data" / "replication" / STREAM
            for aside in folder.glob("aside-*"):
                if not aside.name.endswith("-report"):
                    lines = (aside.with_name(f"{aside.name}-report") / "records.jsonl").read_text().splitlines()
                    found |= {json.loads(line)["row"]["id"] for line in lines}
        return found

    def _check_said(self) -> None:
        for node in self._nodes.values():
            for part in ("owner", "serve", "follow"):
                log = node.log(part)
                for word in ("Traceback", "diverged", "corrupt_wal", "follower_behind_retention"):
                    assert word not in log, f"{node.name} {part} says {word}"

    # --- for people --------------------------------------------------------------------------------------------------------

    def _say(self, what: str) -> None:
        line = f"{time.monotonic() - self._began_s:6.1f} {what}"
        self.story.append(line)
        self._tell(line)

    def _what_happened(self) -> str:
        facts = "\n".join(f"{node.name}: {self._fact(node)}" for node in self._nodes.values())
        writers = "\n".join(f"{w.index}: {len(w.acknowledged)} {dict(w.refusals)}" for w in self._writers)
        logs = "".join(
            f"\n--- {node.name} {part}\n{node.log(part)[-3000:]}"
            for node in self._nodes.values()
            for part in ("owner", "serve", "follow")
        )
        return "\n".join([*self.story, facts, writers, str(dict(self.counts)), logs])

    def _end(self) -> None:
        self._over.set()
        if self._keeper.is_alive():
            self._keeper.join()
        for node in self._nodes.values():
            node.kill()
        for link in (*self._between.values(), *self._to_clients.values()):
            link.close()
        for writer in self._writers:
            writer.end(0.0)


@contextlib.contextmanager
def _folder(seed: int) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=f"siege-{seed}-") as folder:
        yield Path(folder)


def main(arguments: list[str]) -> int:
    """Play, and print the outcome."""
    level, first, count = arguments[0], int(arguments[1]), int(arguments[2])
    intensity = Intensity(
        promotions=int(arguments[3]) if len(arguments) > 3 else 3, faults=5, long_s=3.0, kills_promotions=0.3
    )
    broken = 0
    for seed in range(first, first + count):
        with _folder(seed) as folder:
            siege = Siege(seed, level, folder, intensity=intensity, tell=lambda line: print(line, file=sys.stderr))  # noqa: T201 - for people
            began_s = time.monotonic()
            try:
                siege.play()
            except Exception as error:  # noqa: BLE001 - whatever breaks is found
                broken += 1
                sys.stdout.write(f"seed {seed}: {type(error).__name__} {error}\n")
            sys.stdout.write(f"seed {seed} {level}: {time.monotonic() - began_s:.1f} s, {dict(siege.counts)}\n")
            sys.stdout.flush()
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
