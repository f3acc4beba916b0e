"""Errors of access: access tokens, certificates, and the addresses that a server may listen on."""

from __future__ import annotations

from millstream.errors._root import MillstreamError, Retry


class AccessError(MillstreamError):
    """The caller may not do this, or the rights can't be determined."""

    code = "access"
    retry = Retry.OPERATOR


class Unauthenticated(AccessError):
    """The call has no access token (and no client certificate) that this server accepts; nothing was done."""

    code = "unauthenticated"
    default_hint = "Send a token as `Authorization: Bearer mst_…`; `millstream token create` makes one."


class AccessTokenExpired(Unauthenticated):
    """The call's access token has expired; details: name, expired."""

    code = "access_token_expired"
    default_hint = "Make another one: `millstream token create --name … --expires …`."


class Forbidden(AccessError):
    """The caller has no right to do this; nothing was done. Details: name (of its token), right, stream."""

    code = "forbidden"


class AccessTokenExists(AccessError):
    """An access token of that name exists already; details: name."""

    code = "access_token_exists"
    exit_code = 2
    default_hint = "Choose another name, or take the old one away first: `millstream token revoke NAME`."


class UnknownAccessToken(AccessError):
    """There is no access token of that name or id; details: token."""

    code = "unknown_access_token"
    exit_code = 2
    default_hint = "`millstream token ls` lists them."


class Unprotected(AccessError):
    """The address is reachable from other machines, without TLS or without tokens; the server doesn't listen.

    Details: listen, missing.
    """

    code = "unprotected"
    exit_code = 2


class CertificateUnusable(AccessError):
    """A certificate, its key or the clients' authority is unusable: unreadable, of another key, expired.

    Details: file.
    """

    code = "certificate_unusable"
    exit_code = 2


class UnknownHost(AccessError):
    """The request's host name isn't this server's. Details: host.

    Its address was made to resolve to this machine, or a proxy forwards it.
    """

    code = "unknown_host"
    default_hint = "Ask for localhost or 127.0.0.1; where a proxy on this machine is asked by that name, put it into `[http] hosts`."


class ForeignOrigin(AccessError):
    """A page of another server made the request, in a browser; nothing was done. Details: origin."""

    code = "foreign_origin"
    default_hint = (
        "Ask from a page of this server, or from what isn't a browser; a proxy's name has a place in `[http] hosts`."
    )
