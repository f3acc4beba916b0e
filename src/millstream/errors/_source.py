"""Errors of a PostgreSQL source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from millstream.errors._root import Code, MillstreamError, Retry

_LASTING: Final = frozenset(
    {
        "publication_replaced",
        "source_dsn_invalid",
        "source_version_unsupported",
        "slot_lost",
        "slot_ahead",
        "source_replaced",
    }
)


class SourceError(MillstreamError):
    """An error about the PostgreSQL source; the stream's other parts continue."""

    code = "source"
    retry = Retry.OPERATOR
    codes: ClassVar[Mapping[str, Code]] = {
        "source_unreachable": Code(
            "The connection failed: wrong host or port, a network failure, or the server is starting or stopping.",
            Retry.BACKOFF,
            "Check host, port and that the server runs.",
        ),
        "source_dsn_invalid": Code(
            "The DSN can't be parsed, or names a service or file that doesn't exist.", Retry.OPERATOR, exit_code=2
        ),
        "source_authentication_failed": Code(
            "The server rejects the user or the password, or pg_hba.conf rejects the connection.", Retry.OPERATOR
        ),
        "source_tls_failed": Code(
            "The encrypted connection that the DSN requires failed: a certificate is untrusted, for another host, or missing.",
            Retry.OPERATOR,
            "Check sslmode, sslrootcert, sslcert and sslkey in the DSN: verify-full needs the authority that signed the "
            "server's certificate, and the host name in that certificate.",
        ),
        "source_database_missing": Code("The database named by the DSN doesn't exist.", Retry.OPERATOR),
        "source_privilege_missing": Code(
            "The role lacks a privilege that capture needs; the hint contains the GRANT to run.", Retry.OPERATOR
        ),
        "source_version_unsupported": Code(
            "The server is older than PostgreSQL 14, or isn't PostgreSQL.",
            Retry.OPERATOR,
            "Capture from a server of PostgreSQL 14 to 18.",
        ),
        "wal_level_not_logical": Code(
            "`wal_level` is not `logical`.",
            Retry.OPERATOR,
            "Run `ALTER SYSTEM SET wal_level = 'logical'` and restart the server.",
        ),
        "source_deadlock": Code(
            "PostgreSQL ended a statement of Millstream's because of a deadlock with another session.", Retry.BACKOFF
        ),
        "source_relation_gone": Code(
            "A table or partition was dropped while a statement of Millstream's read the catalogs.", Retry.BACKOFF
        ),
        "slot_active": Code("Another connection uses the slot; details: pid.", Retry.BACKOFF),
        "slot_lost": Code(
            "The slot that this stream followed is gone or invalidated: later changes are unavailable.", Retry.OPERATOR
        ),
        "slot_ahead": Code(
            "The slot was confirmed (or recreated) above the log's end: the changes between are unavailable.",
            Retry.OPERATOR,
        ),
        "source_replaced": Code(
            "Another system, another database or an unrelated timeline answers at this DSN.", Retry.OPERATOR
        ),
        "source_on_standby": Code(
            "The server is a standby that can't be captured from, or not with this slot.",
            Retry.OPERATOR,
            "Point the DSN at the primary, or at a standby of PostgreSQL 16 or newer with its own slot.",
        ),
        "source_behind": Code(
            "A standby hasn't replayed everything that the log has from its primary. Capture retries.",
            Retry.BACKOFF,
            "Check that the standby follows its primary.",
        ),
        "source_switched": Code(
            "Another server or timeline answers than at the start of this session. Capture restarts and checks its history.",
            Retry.BACKOFF,
        ),
        "replica_identity_unusable": Code(
            "A table's replica identity gives updates and deletes no key; the table is captured into history only.",
            Retry.OPERATOR,
        ),
        "table_moved": Code(
            "The table can no longer be read under the snapshot: it was rewritten, dropped or renamed since.",
            Retry.OPERATOR,
        ),
        "no_tables_match": Code("The configured patterns match no table.", Retry.OPERATOR, exit_code=2),
        "snapshot_waits": Code(
            "A snapshot of the source must wait for older transactions there to end.", Retry.BACKOFF
        ),
        "no_free_slot": Code(
            "`max_replication_slots` or `max_wal_senders` is used up.",
            Retry.OPERATOR,
            "Raise max_replication_slots (or max_wal_senders), or drop an unused slot.",
        ),
        "publication_missing": Code("The publication doesn't exist and may not be created.", Retry.OPERATOR),
        "publication_replaced": Code(
            "A publication was dropped or renamed, and PostgreSQL 14 to 17 can't send the changes until it was back.",
            Retry.OPERATOR,
        ),
    }

    @property
    def mends_at_source(self) -> bool:
        """Whether a change at the source alone repairs it, with nothing lost; a running capture retries until then."""
        return self.code not in _LASTING
