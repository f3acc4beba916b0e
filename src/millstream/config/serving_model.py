"""`[http]` and `[flight]`: the addresses that `serve` listens on, its callers, and the limits of a call."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field, StringConstraints

from millstream.config.section import Duration, Section, SizeAboveZero

_ADDRESS: Final = r"^(\[[0-9a-fA-F:.]+\]|[^:\s\[\]]*):\d{1,5}$"

HostName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?$|^\[?[0-9A-Fa-f:.]+\]?$")
]
"""A name or an address, without scheme and port."""


def _apart(listen: str) -> tuple[str, int]:
    """Return host and port."""
    host, _, port = listen.rpartition(":")
    return host.strip("[]") or "0.0.0.0", int(port)  # noqa: S104 - the user wrote `:8787`


class HttpConfig(Section):
    """The address that `serve` listens on, and its callers.

    The certificates, tokens and clients are Arrow Flight's as well.
    """

    listen: str = Field(
        default="127.0.0.1:8787",
        pattern=_ADDRESS,
        description="Host and port. Where other machines reach it, it takes `tls_certificate` and `tokens_required`: without them nothing listens.",
    )
    tokens_required: bool = Field(
        default=False,
        description="Whether callers need an access token (`millstream token create`), or a client certificate that stands for one. Else everybody who "
        "reaches the address may do everything.",
    )
    tls_certificate: str | None = Field(
        default=None,
        min_length=1,
        description="The server's certificate, with those between it and its authority behind it: a PEM file, from the home where it isn't absolute. "
        "It is read again within seconds after it has changed.",
    )
    tls_key: str | None = Field(
        default=None, min_length=1, description="The certificate's key: a PEM file without a passphrase, likewise."
    )
    client_ca: str | None = Field(
        default=None,
        min_length=1,
        description="The authorities of clients' certificates: a PEM file. Where it is set, who shows no certificate of theirs isn't heard (mTLS). "
        "It is read again as the certificate is.",
    )
    clients: dict[str, str] = Field(
        default={},
        description='Which access token a client certificate stands for, by the name in it: `"loader.example.com" = "loader"`. The name is the '
        "certificate's first subject alternative name, or its common name where it has none; the token is named as `millstream token ls` does. A call that "
        "brings a token itself has that one's rights.",
    )
    hosts: list[HostName] = Field(
        default=[],
        description="Names by which callers reach the server beside localhost, 127.0.0.1 and that of `listen`: those of a proxy on this machine, as in "
        '`["millstream.example.com"]`. Without `tokens_required` requests to other names are refused (`unknown_host`), and in any case those that pages of '
        "other servers have made in a browser (`foreign_origin`).",
    )
    body_bytes_max: SizeAboveZero = Field(
        default="32MiB",
        description="Bytes of one request's body, inflated where it is compressed; larger ones are answered 413.",
    )
    inflight_bytes_max: SizeAboveZero = Field(
        default="512MiB",
        description="Memory that all requests in flight may take together: their bodies and what is made of them (JSON counts for several times its "
        "size). Beyond it requests are answered 429, with `Retry-After`.",
    )
    rows_max: int = Field(default=1_000_000, ge=1, description="Rows of one request.")
    connections_max: int = Field(
        default=10_000, ge=1, description="Open connections, idle ones among them; others are answered 503."
    )
    request_timeout: Duration = Field(
        default="30s",
        description="How long a request may take to come, head and body; then it is answered 408, and nothing of it appended.",
    )
    idle_timeout: Duration = Field(
        default="75s",
        description="How long a connection stays open without a request; one that has never had any, for `request_timeout`.",
    )
    append_timeout: Duration = Field(
        default="10s",
        description="How long an append waits for room in the log's queue where the request doesn't say (`deadline_s`); then it is answered 429.",
    )
    queries_max: int = Field(
        default=4,
        ge=1,
        le=6,
        description="Queries (SQL) that run at a time, each with the memory, the room and the time below; more are answered 429.",
    )
    query_memory_bytes_max: SizeAboveZero = Field(
        default="512MiB",
        description="Memory of DuckDB for one query (`query_memory_full` beyond it: answered 422). What doesn't fit goes to the disk where SQL can do with "
        "that. The query's process may have twice as much and 512 MiB (Linux). `read_latest` reads a table's rows in stretches that fit in as much.",
    )
    query_spill_bytes_max: SizeAboveZero = Field(
        default="4GiB",
        description="Room on the disk for what one query puts aside, in `data/queries` (`query_spill_full`: 422). All queries together may take "
        "`queries_max` times as much of the home's disk.",
    )
    query_timeout: Duration = Field(
        default="5m",
        description="How long a query may take until its answer is whole, with the time that its caller takes to read it (`query_timeout`: 422, or an "
        "answer that breaks off where it has begun).",
    )
    drain_delay: Duration = Field(
        default="0s",
        description="How long a server that was told to end goes on as before, but for `/readyz`, which answers 503: so that load balancers send "
        "requests elsewhere first.",
    )
    drain_timeout: Duration = Field(
        default="20s", description="How long requests in flight have to be answered after that."
    )

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port."""
        return _apart(self.listen)


class FlightConfig(Section):
    """Arrow Flight, for bulk: part of `serve`. Certificates, tokens and clients are those of `[http]`."""

    listen: str | None = Field(
        default=None,
        pattern=_ADDRESS,
        description="Host and port, such as `127.0.0.1:8788`. Unset: there is no Flight. What `[http] listen` says of other machines holds here too.",
    )
    calls_max: int = Field(
        default=32,
        ge=1,
        le=1024,
        description="Calls that read at a time, and as many that write; more are told to come again.",
    )
    inflight_bytes_max: SizeAboveZero = Field(
        default="256MiB",
        description="Bytes of rows that have come and aren't durable yet, over all calls; beyond it their senders wait. Each call holds one more batch "
        "beside, of the size that its sender makes it.",
    )

    idle_timeout: Duration = Field(
        default="5m",
        description="How long a caller that appends may send nothing while its next batch is waited for, or leave what it is told untaken. Then it is told so "
        "(`transfer_idle`), and its connection is cut where it doesn't end the call: it would keep one of `calls_max` for ever.",
    )

    @property
    def address(self) -> tuple[str, int] | None:
        """Return host and port; None if there is no Flight."""
        return None if self.listen is None else _apart(self.listen)
