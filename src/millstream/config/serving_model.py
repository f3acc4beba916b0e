"""`[http]` and `[flight]`: the addresses that `serve` listens on, its callers, and the limits of a call."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from millstream.config.formed_texts import HostName, Interval, Listen
from millstream.config.section import Duration, Section, SizeAboveZero
from millstream.model.durations import duration_s

_END_S: Final = 15.0
"""How long a process may take to end after it has drained."""


def _apart(listen: str) -> tuple[str, int]:
    """Return host and port."""
    host, _, port = listen.rpartition(":")
    return host.strip("[]") or "0.0.0.0", int(port)  # noqa: S104 - the user wrote `:8787`


class HttpConfig(Section):
    """The address that `serve` listens on, and its callers.

    The certificates, tokens and clients are Arrow Flight's as well.
    """

    listen: Listen = Field(
        default="127.0.0.1:8787",
        description="Host and port. An address that other machines can reach needs `tls_certificate` and `tokens_required`; "
        "without them the server doesn't listen.",
    )
    processes: int = Field(
        default=1,
        ge=1,
        le=16,
        description="Number of server processes on the port. One process takes rows with one core. Each further process takes "
        "rows with another core, and forwards all other requests to the first. They share the limits below.",
    )
    tokens_required: bool = Field(
        default=False,
        description="Require an access token (`millstream token create`), or a client certificate that stands for one. "
        "Without it, every caller that reaches the address has all rights.",
    )
    tls_certificate: str | None = Field(
        default=None,
        min_length=1,
        description="The server's certificate, followed by the intermediate certificates: a PEM file; a relative path starts "
        "at the home. The server reads it again within seconds after a change.",
    )
    tls_key: str | None = Field(
        default=None,
        min_length=1,
        description="The certificate's key: a PEM file without a passphrase; a relative path starts at the home.",
    )
    client_ca: str | None = Field(
        default=None,
        min_length=1,
        description="Authorities of client certificates: a PEM file. If it is set, a connection without such a certificate "
        "is rejected (mTLS). The server reads it again after a change.",
    )
    clients: dict[str, str] = Field(
        default={},
        description="Access token that a client certificate stands for, by the name in the certificate: "
        '`"loader.example.com" = "loader"`. The name is the certificate\'s first subject alternative name, or '
        "else its common name. The token's name is that in `millstream token ls`. If a call sends a token "
        "itself, the rights are those of that token.",
    )
    hosts: list[HostName] = Field(
        default=[],
        description="Host names of the server in addition to localhost, 127.0.0.1 and the host of `listen`, such as the name "
        'of a proxy on this machine: `["millstream.example.com"]`. Without `tokens_required`, requests to other '
        "names are rejected (`unknown_host`). Requests that a browser sends for pages of other servers are "
        "always rejected (`foreign_origin`).",
    )
    body_bytes_max: SizeAboveZero = Field(
        default="32MiB",
        description="Size in bytes of one request's body, decompressed. Larger requests get status 413. Queries and requests to consumers have 2 MiB at most.",
    )
    inflight_bytes_max: SizeAboveZero = Field(
        default="512MiB",
        description="Memory of all requests in flight: their bodies and the data decoded from them (JSON takes several times "
        "its size). Above it, requests get status 429, with `Retry-After`.",
    )
    rows_max: int = Field(default=1_000_000, ge=1, description="Number of rows in one request, at most.")
    connections_max: int = Field(
        default=10_000,
        ge=1,
        description="Number of open connections, including idle ones and TLS handshakes, at most. Others get status "
        "503; with TLS they are closed without an answer. They are never more than half of the files that a process may "
        "have open (`ulimit -n`).",
    )
    request_timeout: Interval = Field(
        default="30s",
        description="Time in which a request's head and body must arrive. A later one gets status 408, and none of it is "
        "appended.",
    )
    idle_timeout: Interval = Field(
        default="75s",
        description="Time that a connection stays open without a request. Before its first request the limit is "
        "`request_timeout`.",
    )
    append_timeout: Duration = Field(
        default="10s",
        description="Time that an append waits for room in the log's queue, or for a process that is about to write, "
        "unless the request has a `deadline_s`. After that it gets status 429 or 503.",
    )
    queries_max: int = Field(
        default=4,
        ge=1,
        le=6,
        description="Number of SQL queries that run at the same time, each within the limits below. More get status 429.",
    )
    query_memory_bytes_max: SizeAboveZero = Field(
        default="512MiB",
        description="Memory of DuckDB for one query. A query that needs more gets status 422 (`query_memory_full`). SQL "
        "spills to disk if it can. The query's process may use 512 MiB plus twice this value (Linux). "
        "`read_latest` reads a table's rows in ranges that fit in it.",
    )
    query_spill_bytes_max: SizeAboveZero = Field(
        default="4GiB",
        description="Disk space for the spill files of one query, in `data/queries`. A query that needs more gets status 422 "
        "(`query_spill_full`). All queries together use at most `queries_max` times this value on the home's "
        "disk.",
    )
    query_timeout: Interval = Field(
        default="5m",
        description="Time for a query, including the time in which the caller reads the answer. A longer one gets status 422 "
        "(`query_timeout`), or its answer breaks off if it has begun.",
    )
    drain_delay: Duration = Field(
        default="0s",
        description="Time that a server continues to serve after a stop signal, while `/readyz` answers 503, so that load "
        "balancers send requests elsewhere first.",
    )
    drain_timeout: Duration = Field(
        default="20s", description="Time after `drain_delay` in which requests in flight must finish."
    )

    @property
    def ends_within_s(self) -> float:
        """Seconds after a stop signal after which `serve` has ended, or hangs.

        Requests of HTTP finish first, then those of Flight.
        """
        return duration_s(self.drain_delay) + 2 * duration_s(self.drain_timeout) + _END_S

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port."""
        return _apart(self.listen)


class FlightConfig(Section):
    """Arrow Flight, for bulk: part of `serve`. Certificates, tokens and clients are those of `[http]`."""

    listen: Listen | None = Field(
        default=None,
        description="Host and port, such as `127.0.0.1:8788`. Unset: no Flight. The conditions of `[http] listen` for other "
        "machines apply here too.",
    )
    calls_max: int = Field(
        default=32,
        ge=1,
        le=1024,
        description="Number of calls that read at the same time, and as many that write. More are rejected, and can be "
        "repeated.",
    )
    inflight_bytes_max: SizeAboveZero = Field(
        default="256MiB",
        description="Bytes of received rows that aren't durable yet, over all calls. Above it, their senders wait. Each call "
        "holds one more batch, of the size that its sender chose.",
    )

    idle_timeout: Interval = Field(
        default="5m",
        description="Time in which a caller that appends must send its next batch, or read its results. After that the call "
        "ends with `transfer_idle`. If the caller doesn't end the call, the server closes the connection, "
        "because it would hold one of `calls_max` forever.",
    )

    @property
    def address(self) -> tuple[str, int] | None:
        """Return host and port; None if there is no Flight."""
        return None if self.listen is None else _apart(self.listen)
