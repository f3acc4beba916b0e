"""Cables that are pulled between running nodes: connections stay half open, and each end has to find that out."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.nodes.nodes import STREAM, Node, eventually
from tests.nodes.wires import Wires, wires_between
from tests.serving.servers import Authority

import millstream
from millstream.administration.access_token_requests import create_token
from millstream.errors import MillstreamError
from millstream.home.home import Home
from millstream.leadership.node_roles import Roles
from millstream.nodes.replicas import list_replicas
from millstream.protocol.replication.node_promises import Role

pytestmark = pytest.mark.siege


class Client:
    """An application next to a node: it writes one record after the other into the home it is given.

    It repeats each write until it is acknowledged.
    """

    def __init__(self, home: Path) -> None:
        self.acknowledged: list[int] = []
        self.refusals: set[str] = set()
        self._home = home
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def turn_to(self, home: Path) -> None:
        """Write there from now on."""
        self._home = home

    def goes_on(self) -> bool:
        """Wait a while; return whether more is acknowledged."""
        before = len(self.acknowledged)
        self._ending.wait(0.2)
        return len(self.acknowledged) > before

    def end(self) -> None:
        self._ending.set()
        self._thread.join(180)

    def _run(self) -> None:
        while not self._ending.is_set():
            at, one = self._home, len(self.acknowledged) + 1
            with millstream.open(at) as home:
                while at is self._home and not self._ending.is_set():
                    try:
                        home.append(STREAM, "orders", [{"id": one}], session="till", number=one, deadline_s=1.0)
                    except MillstreamError as error:
                        self.refusals.add(error.code)
                        self._ending.wait(0.05)
                    else:
                        self.acknowledged.append(one)
                        one += 1
                        self._ending.wait(0.01)


@contextlib.contextmanager
def nodes_on(wires: Wires, folder: Path, names: str) -> Iterator[list[Node]]:
    """Make nodes as on machines of their own: with certificates, and a token by which they know one another."""
    authority = Authority(folder)
    token: str | None = None
    made: list[Node] = []
    for name in names:
        listens = wires.listens(name)
        certificate, key = authority.issue(name, [listens.partition(":")[0]])
        node = Node(folder / name, name, dict.fromkeys(names, 0), network=wires.network(name))
        there = "\n".join(f'{other} = "grpc+tls://{wires.address(other, name)}"' for other in names)
        text = (
            f'[streams.{STREAM}]\nacks = "durable(1)"\n[streams.{STREAM}.ingest]\nschema_on_write = "create"\n'
            f'[http]\nlisten = "127.0.0.1:0"\ntokens_required = true\ntls_certificate = "{certificate}"\n'
            f'tls_key = "{key}"\n[flight]\nlisten = "{listens}"\n'
            f'[replication]\nnode = "{name}"\nauthority = "{authority.file}"\ntoken = "TOKEN"\n'
            f"[replication.nodes]\n{there}\n"
        )
        file = node.home / "millstream.toml"
        file.write_text(text)
        home = Home(node.home)
        home.prepare()
        _, token = create_token(home, [], on_all=["admin"], name="nodes", given=token)
        file.write_text(text.replace("TOKEN", token))
        made.append(node)
    try:
        yield made
    finally:
        for node in made:
            node.kill()


def phases(node: Node) -> dict[str, str]:
    """Return the phase of its followers, as it sees them."""
    (stream,) = list_replicas(Home(node.home))["streams"]
    return {one["node"]: one["phase"] for one in stream["followers"]}


def test_what_was_acknowledged_outlives_cables_that_are_pulled(tmp_path: Path) -> None:
    """First one follower can't reach the leader, then no node can.

    Another node becomes leader, and the old leader finds out once it is plugged in again.
    """
    with contextlib.ExitStack() as stack:
        wires = wires_between("abc")
        stack.callback(wires.close)
        print(f"links are {wires.kind}")  # noqa: T201 - which of the two is told
        a, b, c = stack.enter_context(nodes_on(wires, tmp_path, "abc"))
        a.start("serve")
        for node in (b, c):
            node.start("serve")
            node.start("follow", "a")
        client = Client(a.home)
        stack.callback(client.end)
        eventually(lambda: len(client.acknowledged) > 3, "the first writes", a, b, c)
        eventually(lambda: phases(a) == {"b": "shipping", "c": "shipping"}, "both follow", a, b, c)
        wires.lose("a", "b")
        eventually(client.goes_on, "what c has is enough", a, b, c)
        wires.unplug("a")
        promoted = b.ask("promote")
        assert promoted.returncode == 0, promoted.stderr
        client.turn_to(b.home)
        eventually(client.goes_on, "b and c go on", a, b, c)
        assert Roles(Home(a.home)).leads(STREAM), "a couldn't hear of it"
        eventually(lambda: phases(a) == {"b": "apart", "c": "apart"}, "a finds out that nobody is there", a)
        wires.heal()
        eventually(lambda: Roles(Home(a.home)).of(STREAM).role is Role.FENCED, "a hears of it", a, b)
        a.start("follow", "b")
        eventually(client.goes_on, "b goes on", a, b, c)
        client.end()
        eventually(lambda: a.rows() == b.rows() == c.rows() != [], "all have the same", a, b, c)
        assert client.acknowledged == a.rows(), "once, in their order"
        assert "not_enough_replicas" in client.refusals, "what nobody else had wasn't acknowledged"
