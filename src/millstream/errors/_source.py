"""Errors of a PostgreSQL source."""

from __future__ import annotations

from typing import ClassVar

from millstream.errors._root import MillstreamError, Retry


class SourceError(MillstreamError):
    """An error about the PostgreSQL source; the stream's other parts go on."""

    code = "source"
    retry = Retry.OPERATOR
    mends_at_source: ClassVar[bool] = True
    """Whether a change at the source alone repairs it, with nothing lost; a running capture retries until then."""


class SourceUnreachable(SourceError):
    """No connection: host, port, network, or the server is starting or stopping."""

    code = "source_unreachable"
    retry = Retry.BACKOFF
    default_hint = "Check host, port and that the server runs."


class SourceDsnInvalid(SourceError):
    """The DSN can't be parsed, or names a service or file that doesn't exist."""

    code = "source_dsn_invalid"
    mends_at_source = False
    exit_code = 2


class SourceAuthenticationFailed(SourceError):
    """Wrong user or password, or pg_hba.conf refuses."""

    code = "source_authentication_failed"


class SourceTlsFailed(SourceError):
    """No encrypted connection as the DSN asks: a certificate is untrusted, for another host, or missing."""

    code = "source_tls_failed"
    default_hint = (
        "Check sslmode, sslrootcert, sslcert and sslkey in the DSN: verify-full takes the authority that signed the server's "
        "certificate, and the host as it stands in there."
    )


class SourceDatabaseMissing(SourceError):
    """The database named by the DSN doesn't exist."""

    code = "source_database_missing"


class SourcePrivilegeMissing(SourceError):
    """The role lacks a privilege that capture needs; the hint holds the GRANT to run."""

    code = "source_privilege_missing"


class SourceVersionUnsupported(SourceError):
    """The server is older than 14 (or isn't PostgreSQL)."""

    code = "source_version_unsupported"
    mends_at_source = False
    default_hint = "PostgreSQL 14 to 18 can be captured."


class WalLevelNotLogical(SourceError):
    """`wal_level` is not `logical`."""

    code = "wal_level_not_logical"
    default_hint = "Run `ALTER SYSTEM SET wal_level = 'logical'` and restart the server."


class NoFreeSlot(SourceError):
    """`max_replication_slots` or `max_wal_senders` is used up."""

    code = "no_free_slot"
    default_hint = "Raise max_replication_slots (or max_wal_senders), or drop a slot that nobody uses."


class SnapshotWaits(SourceError):
    """A snapshot of the source must wait for older transactions there to end."""

    code = "snapshot_waits"
    retry = Retry.BACKOFF


class PublicationMissing(SourceError):
    """The publication doesn't exist and may not be created."""

    code = "publication_missing"


class SlotActive(SourceError):
    """Another connection uses the slot; details: pid."""

    code = "slot_active"
    retry = Retry.BACKOFF


class SlotLost(SourceError):
    """The slot that this stream followed is gone or invalidated: changes since then are unavailable."""

    code = "slot_lost"
    mends_at_source = False


class SlotAhead(SourceError):
    """The slot was confirmed (or recreated) above what the log holds: the changes between are unavailable."""

    code = "slot_ahead"
    mends_at_source = False


class SourceReplaced(SourceError):
    """Another system, database or an unrelated timeline answers under this DSN."""

    code = "source_replaced"
    mends_at_source = False


class SourceOnStandby(SourceError):
    """The server is a standby that can't be captured from, or not with this slot."""

    code = "source_on_standby"
    default_hint = "Point the DSN at the primary, or at a standby of PostgreSQL 16 or newer with a slot of its own."


class SourceBehind(SourceError):
    """A standby hasn't yet replayed everything that the log has from its primary."""

    code = "source_behind"
    retry = Retry.BACKOFF
    default_hint = "It is tried again; see that the standby follows its primary."


class SourceSwitched(SourceError):
    """Another server or timeline answers than at the start of this session."""

    code = "source_switched"
    retry = Retry.BACKOFF
    default_hint = "Capture begins anew, and looks at whose history answers."


class ReplicaIdentityUnusable(SourceError):
    """A table's replica identity gives updates and deletes no key; the table is captured into history only."""

    code = "replica_identity_unusable"


class NoTablesMatch(SourceError):
    """The configured patterns match no table."""

    code = "no_tables_match"
