"""The server's certificate, its key and the clients' authorities: loaded, checked, and reloaded when they change.

A handshake with ourselves, in memory, checks them. So errors that a client would hit (another
certificate's key, an expired certificate) are reported when the server starts, with the file's name. A
failed renewal leaves the current certificate in use.
"""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog

from millstream.errors import AccessError

if TYPE_CHECKING:
    from millstream.home.home import Home

logger = structlog.get_logger("millstream.serve")

LOOK_EVERY_S: Final = 2.0
"""How often to check whether the files have changed."""
_SOON_S: Final = 14 * 86_400.0
"""Remaining lifetime that causes a warning: automatic renewals happen earlier."""
_HANDSHAKE_STEPS: Final = 8


@dataclass(frozen=True, slots=True)
class Certificates:
    """The paths of the files."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @classmethod
    def of_home(cls, home: Home) -> Certificates | None:
        """Return the configured certificates; None if there is no TLS."""
        http = home.config.http
        if http.tls_certificate is None or http.tls_key is None:
            return None
        certificate, key = (home.path / Path(file).expanduser() for file in (http.tls_certificate, http.tls_key))
        return cls(certificate, key, None if http.client_ca is None else home.path / Path(http.client_ca).expanduser())

    def server_context(self) -> ssl.SSLContext:
        """Return a server's context with them.

        Raises:
            AccessError (`certificate_unusable`): a file can't be read, the key is another's or has a passphrase, or one
                has expired.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load(context)
        if self.client_ca is not None:
            _check_readable(self.client_ca)
            try:
                context.load_verify_locations(self.client_ca)
            except ssl.SSLError as error:
                raise _unusable(self.client_ca, f"holds no certificates that can be read: {_words(error)}") from error
            now = time.time()
            ends = [ssl.cert_time_to_seconds(str(one["notAfter"])) for one in context.get_ca_certs()]
            if ends and max(ends) < now:
                raise _unusable(self.client_ca, "has nothing but authorities that have expired")
            context.verify_mode = ssl.CERT_REQUIRED
            # A resumed session doesn't present its certificate again, even if the authorities have
            # changed by then.
            context.num_tickets = 0
            context.options |= ssl.OP_NO_TICKET
        self._check_handshake(context)
        return context

    def read(self) -> tuple[bytes, bytes, bytes | None]:
        """Return the files' bytes: certificate, key and clients' authorities. Raises as `server_context`."""
        self.server_context()
        authorities = None if self.client_ca is None else _check_readable(self.client_ca)
        return _check_readable(self.certificate), _check_readable(self.key), authorities

    def renew(self, context: ssl.SSLContext) -> None:
        """Load certificate and key into a context in use: new connections have them. Raises as `server_context`."""
        self.server_context()
        self._load(context)

    def content(self) -> tuple[bytes | None, ...]:
        """Return the files' content; None for one that can't be read, or isn't configured."""
        found: list[bytes | None] = []
        for file in (self.certificate, self.key, self.client_ca):
            try:
                found.append(None if file is None else file.read_bytes())
            except OSError:
                found.append(None)
        return tuple(found)

    def _load(self, context: ssl.SSLContext) -> None:
        for file in (self.certificate, self.key):
            _check_readable(file)

        def no_passphrase() -> str:
            raise _unusable(
                self.key, "has a passphrase", hint="Use a key without a passphrase: the server can't ask for one."
            )

        try:
            context.load_cert_chain(self.certificate, self.key, no_passphrase)
        except ssl.SSLError as error:
            if "KEY_VALUES_MISMATCH" in str(error):
                raise _unusable(self.key, f"isn't the key of {self.certificate}") from error
            raise _unusable(
                self.certificate, f"and {self.key} are no certificate and key that can be read: {_words(error)}"
            ) from error

    def _check_handshake(self, server: ssl.SSLContext) -> None:
        """Have a client that trusts only this certificate shake hands: it checks the dates as other clients will."""
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        client.load_verify_locations(self.certificate)
        verify, server.verify_mode = server.verify_mode, ssl.CERT_NONE
        try:
            certificate = _shaken(client, server)
        except ssl.SSLCertVerificationError as error:
            raise _unusable(
                self.certificate,
                f"can't be used: {error.verify_message}",
                hint="Have it renewed, or set the clock right.",
            ) from error
        except ssl.SSLError as error:
            raise _unusable(self.certificate, f"can't be used: {_words(error)}") from error
        finally:
            server.verify_mode = verify
        left_s = ssl.cert_time_to_seconds(str(certificate.get("notAfter"))) - time.time()
        if left_s < _SOON_S:
            logger.warning("the certificate expires soon", file=str(self.certificate), days=round(left_s / 86_400, 1))


class Renewal:
    """Checks whether the files have changed, and loads them into a context. Called on the context's thread."""

    def __init__(self, certificates: Certificates, context: ssl.SSLContext) -> None:
        self._certificates = certificates
        self.context: Final = context
        self._newest = context
        if certificates.client_ca is not None:
            # Authorities can be added to a context, but not removed: each connection switches to the
            # newest context.
            context.sni_callback = self._choose
        self._seen: tuple[bytes | None, ...] | None = certificates.content()

    def _choose(self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Switch a connection after its client hello, whether it names a server or not."""
        del name, context
        connection.context = self._newest

    @classmethod
    def of_home(cls, home: Home) -> Renewal | None:
        """Return the renewal of a new context with the configured files; None if there is no TLS.

        Raises as `Certificates.server_context`.
        """
        certificates = Certificates.of_home(home)
        return None if certificates is None else cls(certificates, certificates.server_context())

    def look(self) -> bool:
        """Return whether the context has new files. Unusable files are logged once, and the current ones stay.

        Files rewritten with the same content renew nothing: calls of Flight would be ended for it.
        """
        found = self._certificates.content()
        if found == self._seen:
            return False
        self._seen = found
        try:
            if self._certificates.client_ca is None:
                self._certificates.renew(self.context)
            else:
                self._newest = self._certificates.server_context()
        except AccessError as error:
            logger.warning(
                "the certificate or the clients' authority has changed and can't be used; what was before stays",
                error=error.message,
                code=error.code,
            )
            return False
        except OSError as error:
            # A file was replaced between two reads of it, or no descriptor is free: the next look finds more.
            self._seen = None
            logger.warning("the certificate's files can't be read now; they are looked at again", error=str(error))
            return False
        logger.info("the certificate was renewed", file=str(self._certificates.certificate))
        return True


def _shaken(client: ssl.SSLContext, server: ssl.SSLContext) -> dict[str, Any]:
    """Return the server's certificate as a client sees it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(_HANDSHAKE_STEPS):
        waiting = 0
        for side in (ours, theirs):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                waiting += 1
        if not waiting:
            break
    return dict(ours.getpeercert() or {})


def _check_readable(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise _unusable(file, f"can't be read: {error.strerror}") from error


def _unusable(
    file: Path, what: str, *, hint: str = "See [http] tls_certificate, tls_key and client_ca in millstream.toml."
) -> AccessError:
    return AccessError(f"{file} {what}", code="certificate_unusable", hint=hint, file=str(file))


def _words(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
