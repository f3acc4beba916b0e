"""The catalog's access tokens: those of one home."""

from __future__ import annotations

import json
import re
import secrets
import string
from typing import Final

from sqlalchemy import ColumnElement, and_, delete, select

import millstream.catalog.sql_tables as t
from millstream.catalog.catalog_part import CatalogPart, now_us
from millstream.catalog.row_types import AccessToken, HomeIdentity
from millstream.errors import AccessError, UsageError
from millstream.model.access import Rights, digest, token_parts, token_text

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
