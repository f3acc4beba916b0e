"""Errors of access: access tokens, certificates, and the addresses that a server may listen on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from millstream.errors._root import Code, MillstreamError, Retry


class AccessError(MillstreamError):
    """The caller may not do this, or the rights can't be determined."""

    code = "access"
    retry = Retry.OPERATOR
    codes: ClassVar[Mapping[str, Code]] = {
        "forbidden": Code(
            "The caller has no right to do this; nothing was done. Details: name (of its token), right, stream.",
            Retry.OPERATOR,
        ),
        "access_token_exists": Code(
            "An access token of that name exists already; details: name.",
            Retry.OPERATOR,
            "Choose another name, or revoke the old token first: `millstream token revoke NAME`.",
            exit_code=2,
        ),
        "unknown_access_token": Code(
            "There is no access token of that name or id; details: token.",
            Retry.OPERATOR,
            "Run `millstream token ls` to list the tokens.",
            exit_code=2,
        ),
        "unprotected": Code(
            "The address is reachable from other machines, without TLS or without tokens; the server doesn't "
            "listen. Details: listen, missing.",
            Retry.OPERATOR,
            exit_code=2,
        ),
        "unknown_host": Code(
            "The request's host name isn't this server's: a foreign name resolves to this machine, or a proxy "
            "forwards it. Details: host.",
            Retry.OPERATOR,
            "Use localhost or 127.0.0.1; if a proxy on this machine forwards that name, add it to `[http] hosts`.",
        ),
        "audit_unwritable": Code(
            "The audit log can't be written; details: outcome. `asked`: nothing was done.",
            Retry.OPERATOR,
            "Make room on the home's disk, and let the server's user write its `data` folder.",
        ),
        "foreign_origin": Code(
            "A page of another server made the request, in a browser; nothing was done. Details: origin.",
            Retry.OPERATOR,
            "Send the request from a page of this server or outside a browser; add a proxy's name to `[http] hosts`.",
        ),
        "certificate_unusable": Code(
            "A certificate, its key or the clients' authority is unusable: unreadable, of another key, or expired. Details: file.",
            Retry.OPERATOR,
            exit_code=2,
        ),
    }


class Unauthenticated(AccessError):
    """The call has no access token (and no client certificate) that this server accepts; nothing was done."""

    code = "unauthenticated"
    default_hint = (
        "Send a token as `Authorization: Bearer mst_…`, or `connect(url, token=…)` in Python; create one with"
        " `millstream token create`."
    )
    codes: ClassVar[Mapping[str, Code]] = {
        "access_token_expired": Code(
            "The call's access token has expired; details: name, expired.",
            Retry.OPERATOR,
            "Create another token: `millstream token create --name … --expires …`.",
        ),
    }
