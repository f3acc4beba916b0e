"""`millstream serve` in a process of its own, and certificates for it and for its clients."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import trustme
from tests.app.homes import wait_for
from tests.commands import Command

LOCAL: Final = ("localhost", "127.0.0.1")


@dataclass(slots=True)
class Served:
    """A running server."""

    process: Command
    said: list[dict[str, Any]] = field(default_factory=list)
    """Its log, as lines arrive."""

    @property
    def address(self) -> str:
        """Return the address of its HTTP."""
        return self._address("listening")

    @property
    def flight(self) -> str:
        """Return the address of its Flight."""
        return self._address("flight listens")

    def _address(self, event: str) -> str:
        """Return the address in the event's log line; the order of the two lines isn't fixed."""
        wait_for(lambda: event in self.events() or self.process.poll() is not None, what=lambda: self.said)
        return str(next(line["address"] for line in list(self.said) if line["event"] == event))

    def events(self) -> list[str]:
        """Return the events in its log so far."""
        return [str(line["event"]) for line in list(self.said)]


@contextlib.contextmanager
def served(home: Path, *words: str, until: str = "listening", **environ: str) -> Iterator[Served]:
    """Run a server of the home, ready once it has logged `until`; it ends without an error."""
    words = "--home", str(home), "serve", "--log-format", "json", *words
    environ = {**os.environ, "HOME": "/nonexistent", "MILLSTREAM_HTTP__LISTEN": "127.0.0.1:0"} | environ
    process = Command(words, stderr=subprocess.PIPE, text=True, env=environ)
    found = Served(process)
    thread = threading.Thread(target=_hear, args=(found,), daemon=True)
    thread.start()
    try:
        wait_for(lambda: until in found.events() or process.poll() is not None, what=lambda: found.said)
        assert process.poll() is None, found.said
        yield found
    except BaseException:
        process.kill()
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(180)
        thread.join(180)
        assert process.stderr is not None
        process.stderr.close()
    assert code == 0, found.said


def _hear(found: Served) -> None:
    assert found.process.stderr is not None
    for line in found.process.stderr:
        found.said.append(json.loads(line) if line.startswith("{") else {"event": line})


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority that writes certificates to files."""

    folder: Path
    ca: trustme.CA = field(default_factory=trustme.CA)

    @property
    def file(self) -> Path:
        """Return the file of its own certificate."""
        file = self.folder / "ca.pem"
        if not file.exists():  # once: servers look whether it changes
            self.ca.cert_pem.write_to_path(file)
        return file

    def issue(self, name: str, identities: Sequence[str] = LOCAL, **options: Any) -> tuple[Path, Path]:
        """Issue a certificate; return its file and its key's."""
        leaf = self.ca.issue_cert(*identities, **options)
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        leaf.cert_chain_pems[0].write_to_path(certificate)
        leaf.private_key_pem.write_to_path(key)
        return certificate, key

    def client(self, shown: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """Return a client's TLS context: it trusts this authority, and shows the given certificate."""
        context = ssl.create_default_context(cafile=self.file)
        if shown is not None:
            context.load_cert_chain(*shown)
        return context
