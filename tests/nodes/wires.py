"""The network between nodes, and how a test cuts it.

Links are real cables between network namespaces if the machine allows that, else proxies on loopback.

In a namespace of its own a node has one cable to a bridge. If the cable is pulled, or packets go nowhere, no
end is notified: no RST and no answer from any kernel, so connections stay half open until an end gives them up.
Proxies keep silent in either direction, and their own ends acknowledge the bytes that they take.

Whatever is made in namespaces goes with the processes that hold them, and these end when this process does,
however that ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from tests.cutting import BOTH, Link, Way

from millstream.testing._servers.ports import free_port

_FLIGHT: Final = 8788
_NOBODY: Final = "02:00:00:00:00:ff"
"""A network card that doesn't exist: packets to it go nowhere."""
_TOOLS: Final = ("ip", "nsenter", "unshare", "cat")


class Wires(Protocol):
    """Links between nodes; `heal` undoes whatever was done to them."""

    kind: str
    """How they are cut, for people."""

    def listens(self, node: str) -> str:
        """Return the address where the node's Flight listens."""

    def address(self, of: str, at: str) -> str:
        """Return the address at which one node reaches another."""

    def network(self, node: str) -> str:
        """Return the file of the namespace in which the node's processes run; empty: this process's."""

    def lose(self, sender: str, receiver: str) -> None:
        """Drop what the sender sends to the receiver; the other direction works."""

    def unplug(self, node: str) -> None:
        """Cut the node off in both directions."""

    def heal(self) -> None:
        """Let everything arrive again."""

    def close(self) -> None:
        """Remove everything."""


def wires_between(names: str) -> Wires:
    """Return the best links that this machine allows, for nodes of a letter each."""
    why = _why_no_namespaces()
    return ProxyWires(names, why) if why else NamespaceWires(names)


class NamespaceWires:
    """Links between namespaces, as the module describes. They need root, iproute2 and util-linux."""

    def __init__(self, names: str) -> None:
        self.kind = "cables between network namespaces"
        self._addresses: Final = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}
        self._lost: set[tuple[str, str]] = set()
        self._holders: list[subprocess.Popen[bytes]] = []
        try:
            self._bridge: Final = self._hold()
            _ip(self._bridge, "link add name bridge type bridge")
            _ip(self._bridge, "link set bridge up")
            self._nodes: Final = {name: self._plug_in(name) for name in names}
        except BaseException:
            self.close()
            raise

    def listens(self, node: str) -> str:
        return f"{self._addresses[node]}:{_FLIGHT}"

    def address(self, of: str, at: str) -> str:
        del at
        return self.listens(of)

    def network(self, node: str) -> str:
        return _network(self._nodes[node])

    def lose(self, sender: str, receiver: str) -> None:
        # Only the sender gets a wrong address for the receiver's card.
        to = self._addresses[receiver]
        _ip(self._nodes[sender], f"neigh replace {to} lladdr {_NOBODY} dev cable nud permanent")
        self._lost.add((sender, receiver))

    def unplug(self, node: str) -> None:
        _ip(self._bridge, f"link set to-{node} down")

    def heal(self) -> None:
        for sender, receiver in self._lost:
            _ip(self._nodes[sender], f"neigh del {self._addresses[receiver]} dev cable")
        self._lost.clear()
        for node in self._nodes:
            _ip(self._bridge, f"link set to-{node} up")

    def close(self) -> None:
        for holder in self._holders:
            assert holder.stdin is not None
            holder.stdin.close()
            holder.wait(180)
            assert holder.stdout is not None
            holder.stdout.close()

    def _plug_in(self, name: str) -> int:
        pid = self._hold()
        _ip(self._bridge, f"link add name to-{name} type veth peer name cable netns {pid}")
        _ip(self._bridge, f"link set to-{name} master bridge up")
        _ip(pid, "link set lo up")
        _ip(pid, f"addr add {self._addresses[name]}/24 dev cable")
        _ip(pid, "link set cable up")
        return pid

    def _hold(self) -> int:
        """Start a process that does nothing, in a namespace of its own."""
        holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._holders.append(holder)
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.write(b"there\n")
        holder.stdin.flush()
        if holder.stdout.readline() != b"there\n":
            raise OSError("no network namespace can be made")
        return holder.pid


class ProxyWires:
    """Links through proxies, as the module describes."""

    def __init__(self, names: str, why: str) -> None:
        self.kind = f"proxies of loopback ({why})"
        self._ports: Final = {name: free_port() for name in names}
        self._links: Final = {(x, y): Link(self._ports[y]) for x in names for y in names if x != y}

    def listens(self, node: str) -> str:
        return f"127.0.0.1:{self._ports[node]}"

    def address(self, of: str, at: str) -> str:
        return self.listens(of) if of == at else f"127.0.0.1:{self._links[at, of].port}"

    def network(self, node: str) -> str:
        del node
        return ""

    def lose(self, sender: str, receiver: str) -> None:
        self._links[sender, receiver].silence(frozenset({Way.TO}))
        self._links[receiver, sender].silence(frozenset({Way.BACK}))

    def unplug(self, node: str) -> None:
        self._each(lambda link: link.silence(BOTH), [pair for pair in self._links if node in pair])

    def heal(self) -> None:
        self._each(lambda link: link.heal(), list(self._links))

    def close(self) -> None:
        self._each(lambda link: link.close(), list(self._links))

    def _each(self, do: Callable[[Link], None], pairs: Sequence[tuple[str, str]]) -> None:
        for pair in pairs:
            do(self._links[pair])


def _why_no_namespaces() -> str:
    """Return why namespaces can't be made and cut; empty if they can."""
    if os.environ.get("MILLSTREAM_WIRES") == "proxies":
        return "as asked"
    lacking = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if lacking or os.geteuid() != 0:
        return f"no {', '.join(lacking)}" if lacking else "not root"
    try:
        tried = NamespaceWires("xy")
        tried.lose("x", "y")
        tried.unplug("x")
        tried.heal()
        tried.close()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"namespaces can't be had: {error}"
    return ""


def _network(pid: int) -> str:
    return f"/proc/{pid}/ns/net"


def _ip(pid: int, words: str) -> None:
    subprocess.run(
        ["nsenter", f"--net={_network(pid)}", "ip", *words.split()], check=True, capture_output=True, timeout=60
    )
