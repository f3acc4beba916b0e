"""A leader's Flight server: its address, certificates on both sides, and a probe before the first call."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow.flight as fl

from millstream.errors import AccessError, LinkLost

_HANDSHAKE_STEPS: Final = 4
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""First bytes of an HTTP/2 client: its preface, and an empty settings frame."""
_TLS_ALERT: Final = b"\x15"
_OPTIONS: Final = (
    # A connection of its own: two links that share one would be cut together.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)


@dataclass(frozen=True, slots=True)
class LeaderAddress:
    """The address of the leader's Flight server, with credentials.

    Files are read at each connection, so a renewed one is used.
    """

    place: str
    """`host:port`."""
    is_tls: bool = False
    authority: Path | None = None
    """File with the authority of the leader's certificate; None: the system's authorities."""
    certificate: Path | None = None
    key: Path | None = None
    """Key of the client certificate; both are set if the leader asks for one."""
    token: Callable[[], str | None] = lambda: None

    def client(self) -> Any:
        """Return a Flight client. Raises `AccessError` (`certificate_unusable`) if a file can't be read."""
        options: dict[str, Any] = {"generic_options": list(_OPTIONS)}
        if self.is_tls:
            if self.authority is not None:
                options["tls_root_certs"] = _read(self.authority)
            if self.certificate is not None and self.key is not None:
                options |= {"cert_chain": _read(self.certificate), "private_key": _read(self.key)}
        return fl.FlightClient(f"{'grpc+tls' if self.is_tls else 'grpc'}://{self.place}", **options)

    def call_options(self) -> Any:
        """Return the options of each call."""
        token = self.token()
        return fl.FlightCallOptions(headers=[] if token is None else [(b"authorization", f"Bearer {token}".encode())])

    def probe(self, timeout_s: float) -> None:
        """Connect once and shake hands: gRPC would retry such errors silently; here they are raised.

        Raises:
            LinkLost: it can't be reached in time; or it speaks TLS, and the address is without TLS.
            AccessError (`certificate_unusable`): the leader's certificate has expired or isn't trusted here, or it
                doesn't trust ours.
        """
        host, _, port = self.place.rpartition(":")
        host = host.strip("[]")
        try:
            with socket.create_connection((host, int(port)), max(timeout_s, 0.05)) as connection:
                if self.is_tls:
                    self._shake_hands(connection, host)
                else:
                    self._greet(connection)
        except ssl.SSLCertVerificationError as error:
            raise AccessError(
                f"the certificate of {self.place} can't be used: {error.verify_message}",
                code="certificate_unusable",
                hint="Have it renewed, trust its authority, or set the clock right.",
                place=self.place,
            ) from error
        except ssl.SSLError as error:
            raise AccessError(
                f"{self.place} and this node don't shake hands: {_inbox(error)}",
                code="certificate_unusable",
                hint="Check that both use TLS, and that each trusts the other's authority.",
                place=self.place,
            ) from error
        except TimeoutError as error:
            raise LinkLost(f"{self.place} didn't answer within {timeout_s:g} s", place=self.place) from error
        except (OSError, ValueError) as error:
            raise LinkLost(f"{self.place} can't be reached: {error}", place=self.place) from error

    def _greet(self, connection: socket.socket) -> None:
        """Begin as HTTP/2 without TLS does. A TLS server sends an alert or hangs up, which gRPC doesn't report."""
        connection.sendall(_PREFACE)
        if connection.recv(1) in (b"", _TLS_ALERT):
            raise LinkLost(
                f"{self.place} has ended the connection at its first message: where it speaks TLS, it doesn't speak without",
                hint="Write the node's address as grpc+tls://… in [replication.nodes].",
                place=self.place,
            )

    def _shake_hands(self, connection: socket.socket, host: str) -> None:
        if self.authority is not None:
            _read(self.authority)
        context = ssl.create_default_context(cafile=None if self.authority is None else self.authority)
        context.set_alpn_protocols(["h2"])
        if self.certificate is not None and self.key is not None:
            _check_own(self.certificate, self.key)
            context.load_cert_chain(self.certificate, self.key)
        with context.wrap_socket(connection, server_hostname=host) as tls:
            # gRPC's server speaks first, once it has checked our certificate; its verdict arrives
            # here.
            if not tls.recv(1):
                raise AccessError(
                    f"{self.place} has ended the connection: it asks for a certificate, and trusts none that this node has shown",
                    code="certificate_unusable",
                    hint="Give this node a certificate of an authority that the leader trusts.",
                    place=self.place,
                )


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise AccessError(
            f"{file} can't be read: {error.strerror}", code="certificate_unusable", file=str(file)
        ) from error


def _check_own(certificate: Path, key: Path) -> None:
    """Shake hands with ourselves, in memory: a leader doesn't report that our own certificate has expired."""
    for file in (certificate, key):
        _read(file)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    server.verify_mode = ssl.CERT_REQUIRED
    server.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        server.load_verify_locations(certificate)
        for context in (server, client):
            context.load_cert_chain(certificate, key)
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        sides = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
        for side in sides * _HANDSHAKE_STEPS:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise AccessError(
            f"{certificate}, which this node shows the leader, can't be used: {error.verify_message}",
            code="certificate_unusable",
            hint="Have it renewed, or set the clock right.",
            file=str(certificate),
        ) from error
    except ssl.SSLError as error:
        raise AccessError(
            f"{certificate} and {key} are no certificate and key that can be used: {_inbox(error)}",
            code="certificate_unusable",
            file=str(certificate),
        ) from error


def _inbox(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
