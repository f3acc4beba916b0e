"""The catalog's calls. Each is one short transaction, durable when it returns, safe from any thread and process."""

from __future__ import annotations

import json
import re
import secrets
import string
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import ColumnElement, and_, delete, select

import millstream.catalog.sql_tables as t
from millstream.catalog.adopt_from_log import Adoption
from millstream.catalog.catalog_part import CatalogPart, now_us
from millstream.catalog.database import BUSY_TIMEOUT_S, CatalogDatabase
from millstream.catalog.retention_holders import Holders
from millstream.catalog.row_types import AccessToken, HomeIdentity
from millstream.catalog.sources import Sources
from millstream.catalog.streams import Streams
from millstream.catalog.table_copies import Copies
from millstream.catalog.tables import Tables
from millstream.closing import Closing
from millstream.errors import AccessError, UsageError
from millstream.model.access import Rights, digest, token_parts, token_text

if TYPE_CHECKING:
    from millstream.model.ids import StreamId
    from millstream.protocol.sequencer import Ledger


_ID_BYTES: Final = 6
_SECRET_LETTERS: Final = string.ascii_letters + string.digits
_SECRET_LENGTH: Final = 43  # 62^43 is more than 2^256
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}\Z")


class Tokens(CatalogPart):
    """Access tokens of a home."""

    _home: HomeIdentity | None

    def create_access_token(
        self, rights: Rights, *, name: str | None = None, expires_us: int | None = None, given: str | None = None
    ) -> tuple[AccessToken, str]:
        """Create an access token.

        Args:
            name: name for people; None: its id.
            expires_us: time of expiry, in microseconds since 1970; None: it is valid until it is revoked.
            given: text of a token that another home has created; here it has these rights. None: a new token is drawn.

        Returns:
            The stored token, and its text, which can't be had again.

        Raises:
            AccessError (`access_token_exists`): there is a token of that name; or the given one is known here already.
            UsageError: the text can't be a name, or the given text is no token.
        """
        parts = None if given is None else token_parts(given)
        if given is not None and parts is None:
            raise UsageError("what was given is no token", hint="Pass the token as it was printed: mst_….")
        token_id = secrets.token_hex(_ID_BYTES) if parts is None else parts[0]
        if name is not None and _NAME.match(name) is None:
            raise UsageError(
                f"{name!r} can't name a token",
                hint="Use letters, digits and . _ @ -, at most 63, with a letter, a digit or _ first.",
            )
        secret = "".join(secrets.choice(_SECRET_LETTERS) for _ in range(_SECRET_LENGTH)) if parts is None else parts[1]
        made = AccessToken(token_id, name or token_id, digest(secret), rights, now_us(), expires_us)
        row = {
            "id": made.id,
            "home": self._owner(),
            "name": made.name,
            "digest": made.digest,
            "rights": json.dumps(rights.as_dict()),
            "created_us": made.created_us,
            "expires_us": expires_us,
        }
        keys = [t.access_tokens.c.home, t.access_tokens.c.name]
        put = self._database.insert(t.access_tokens).values(row).on_conflict_do_nothing(index_elements=keys)
        with self._database.write() as connection:
            if connection.execute(select(t.access_tokens.c.id).where(self._mine(token_id))).first():
                raise AccessError(
                    "that token is known here already",
                    code="access_token_exists",
                    hint="`millstream token ls` lists the home's tokens.",
                )
            if connection.execute(put.returning(t.access_tokens.c.id)).first() is None:
                raise AccessError(f"there is a token {made.name} already", code="access_token_exists", name=made.name)
        return made, token_text(token_id, secret)

    def access_tokens(self) -> list[AccessToken]:
        """Return the home's access tokens, by name; expired ones included."""
        query = select(t.access_tokens).where(t.access_tokens.c.home == self._owner())
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        found = [
            AccessToken(
                r.id, r.name, bytes(r.digest), Rights.from_dict(json.loads(r.rights)), r.created_us, r.expires_us
            )
            for r in rows
        ]
        return sorted(found, key=lambda token: token.name)

    def revoke_access_token(self, token: str) -> AccessToken:
        """Revoke an access token: nothing of it stays stored.

        Args:
            token: its name, or its id.

        Raises:
            AccessError (`unknown_access_token`): there is none.
        """
        known = self.access_tokens()
        found = next((one for one in known if one.name == token), None) or next(
            (one for one in known if one.id == token), None
        )
        if found is not None:
            gone = delete(t.access_tokens).where(self._mine(found.id))
            with self._database.write() as connection:
                if connection.execute(gone).rowcount:
                    return found
        raise AccessError(f"there is no token {token}", code="unknown_access_token", token=token)

    def _mine(self, token_id: str) -> ColumnElement[bool]:
        """Return the condition for this home's row; homes that share the catalog may know the token as well."""
        return and_(t.access_tokens.c.home == self._owner(), t.access_tokens.c.id == token_id)

    def _owner(self) -> str:
        return "" if self._home is None else self._home.id


class Facts(CatalogPart):
    """Values stored by components."""

    def put_fact(self, scope: str, name: str, value: Any) -> None:
        """Store a JSON-able value; replaces the old one. `scope` separates components (`capture/<stream id>`)."""
        change = self._database.insert(t.facts).values(scope=scope, name=name, value=json.dumps(value))
        keys = [t.facts.c.scope, t.facts.c.name]
        with self._database.write() as connection:
            connection.execute(
                change.on_conflict_do_update(index_elements=keys, set_={"value": change.excluded["value"]})
            )

    def add_fact(self, scope: str, name: str, value: Any) -> None:
        """Store a JSON-able value if there is none of the name; otherwise the old one stays."""
        change = self._database.insert(t.facts).values(scope=scope, name=name, value=json.dumps(value))
        with self._database.write() as connection:
            connection.execute(change.on_conflict_do_nothing(index_elements=[t.facts.c.scope, t.facts.c.name]))

    def fact(self, scope: str, name: str, default: Any = None) -> Any:
        """Return the value of that name, else `default`."""
        query = select(t.facts.c.value).where(t.facts.c.scope == scope, t.facts.c.name == name)
        with self._database.read() as connection:
            found = connection.execute(query).scalar()
        return default if found is None else json.loads(found)

    def facts(self, scope: str) -> dict[str, Any]:
        """Return all values of a scope."""
        query = select(t.facts.c.name, t.facts.c.value).where(t.facts.c.scope == scope)
        with self._database.read() as connection:
            return {row.name: json.loads(row.value) for row in connection.execute(query)}

    def drop_fact(self, scope: str, name: str) -> None:
        """Delete a value."""
        with self._database.write() as connection:
            connection.execute(delete(t.facts).where(t.facts.c.scope == scope, t.facts.c.name == name))


class Catalog(Streams, Sources, Tables, Adoption, Copies, Holders, Tokens, Facts, Closing):
    """A home's catalog. Opening it creates it, or upgrades it to this version's schema.

    Args:
        where: a file's path (SQLite), or the address of a PostgreSQL database as libpq takes it.
        home: the home, if several may share the catalog. The object then returns this home's streams only, and no
            other home may have a stream of the same name. None: all streams.
        busy_timeout_s: how long a call waits for a lock, or for a server that has gone away.

    Raises:
        CatalogError (`catalog_too_new`): a newer Millstream wrote it.
        CatalogError (`catalog_busy`): it stayed locked past the busy timeout (any call may raise that).
        CatalogError (`catalog_unreachable`): its server doesn't answer (any call may raise that, once it has waited as long).
        CatalogError (`catalog_replaced`): one of its files was removed or replaced while it was open (any call may raise that).
        DiskFull: there is no space for what a call writes; nothing was changed.
        CatalogError: it can't be read or written (any call may raise that).

    Concurrency: any number of threads and processes; one object serves all threads of a process. Open it after a fork,
    never before.
    """

    def __init__(
        self, where: str | Path, *, home: HomeIdentity | None = None, busy_timeout_s: float = BUSY_TIMEOUT_S
    ) -> None:
        self._home = home
        self._database = CatalogDatabase(where, busy_timeout_s=busy_timeout_s)
        self._known_names = {}

    @property
    def home(self) -> HomeIdentity | None:
        """The home whose streams it returns; None: those of all."""
        return self._home

    @property
    def database(self) -> CatalogDatabase:
        """The database below, for components that keep tables of their own next to the catalog's."""
        return self._database

    def shared_ledger(self, stream: StreamId) -> tuple[Ledger, int] | None:
        """Return the writers of a stream and their numbers, and the server's time in microseconds since 1970.

        An entry without a location is a writer that owned the stream. None if writers can't share the catalog.
        """
        if self._database.address is None:
            return None
        from millstream.catalog.shared_sequence import PostgresSequenceStore

        return PostgresSequenceStore(self._database, stream).look()

    def close(self) -> None:
        """Close the connections; completed calls are durable already."""
        self._database.close()
