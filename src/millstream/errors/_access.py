"""Errors of who may do what: access tokens, certificates, and what may listen where."""

from __future__ import annotations

from millstream.errors._root import MillstreamError, Retry


class AccessError(MillstreamError):
    """The caller may not do it, or it can't be told who may."""

    code = "access"
    retry = Retry.OPERATOR


class Unauthenticated(AccessError):
    """The call has no access token (and no client certificate) that is known here; nothing was done."""

    code = "unauthenticated"
    default_hint = "Send a token as `Authorization: Bearer mst_…`; `millstream token create` makes one."


class AccessTokenExpired(Unauthenticated):
    """The call's access token has expired; details: name, expired."""

    code = "access_token_expired"
    default_hint = "Make another one: `millstream token create --name … --expires …`."


class Forbidden(AccessError):
    """The caller is known, and may not do this; nothing was done. Details: name (of its token), right, stream."""

    code = "forbidden"


class AccessTokenExists(AccessError):
    """There is an access token of that name already; details: name."""

    code = "access_token_exists"
    exit_code = 2
    default_hint = "Choose another name, or take the old one away first: `millstream token revoke NAME`."


class UnknownAccessToken(AccessError):
    """There is no access token of that name or id; details: token."""

    code = "unknown_access_token"
    exit_code = 2
    default_hint = "`millstream token ls` lists them."


class Unprotected(AccessError):
    """It would listen where other machines reach it, without TLS or without tokens; it doesn't. Details: listen, missing."""

    code = "unprotected"
    exit_code = 2


class CertificateUnusable(AccessError):
    """A certificate, its key or the clients' authority can't be used: unreadable, of another key, expired. Details: file."""

    code = "certificate_unusable"
    exit_code = 2


class UnknownHost(AccessError):
    """The request was sent to a name that isn't this server's: its address was made to stand for this machine, or a proxy hands it on. Details: host."""

    code = "unknown_host"
    default_hint = "Ask for localhost or 127.0.0.1; where a proxy on this machine is asked by that name, put it into `[http] hosts`."


class ForeignOrigin(AccessError):
    """A page of another server has made the request, in somebody's browser; nothing was done. Details: origin."""

    code = "foreign_origin"
    default_hint = (
        "Ask from a page of this server, or from what isn't a browser; a proxy's name has a place in `[http] hosts`."
    )
