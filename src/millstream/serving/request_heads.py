"""The checks of a request's header that httptools leaves to its caller: version, `Host`, `Transfer-Encoding`.

Two programs that read the same bytes as different requests let a client smuggle one of them past the
first program, for instance past a proxy's access rules. So a header with several meanings is refused.
httptools itself refuses two lengths, a length next to chunks, folded lines, bare line feeds, and a space
in front of a colon.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from millstream.errors import UsageError
from millstream.serving.problem_documents import plain_problem, problem_of

HEAD_BYTES_MAX: Final = 64 << 10
FIELDS_MAX: Final = 256
"""Header fields of a request. As Python's objects each takes a hundred bytes more than it has: 64 KiB of the shortest took a megabyte."""
_VERSIONS: Final = {"1.0", "1.1"}
_HOST: Final = re.compile(rb"\[([0-9A-Fa-f:.]+)\](?::[0-9]*)?|[A-Za-z0-9._~!$&'()*+,;=%:-]*")
"""An address in brackets, or the characters of a host name or another address; with a port (RFC 3986, 3.2.2)."""
_HOST_HINT: Final = "Send one Host header: the name of this server."


class HeadRefused(Exception):
    """A request's header can't be accepted; the connection ends after the answer.

    Attributes:
        document: the answer, a problem document.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        super().__init__(document["detail"])
        self.document: Final = document


def check_head(version: str, target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Check the header of a request.

    Args:
        version: HTTP's, as `1.1`.
        target: its path and query, as sent.
        headers: with names in lower case.

    Raises:
        HeadRefused: another version than 1.0 or 1.1 (400, 505), several `Host` headers, none in HTTP/1.1
            or one that can't be a host (400), a fragment (400), a transfer coding in HTTP/1.0 (400) or an unknown one (501).
    """
    if version not in _VERSIONS:
        status = HTTPStatus.BAD_REQUEST if version < "1" else HTTPStatus.HTTP_VERSION_NOT_SUPPORTED
        raise HeadRefused(plain_problem(status, f"HTTP/{version} isn't supported; HTTP/1.1 is"))
    if b"#" in target:  # a rule of a proxy may see the end of a path in it
        raise _invalid("the request's target has a fragment", "Write # in a path or a query as %23.")
    hosts, codings = 0, None
    for name, value in headers:
        if name == b"host":
            hosts += 1
            if not _is_host(value.strip(b" \t")):
                raise _invalid("the request's Host header isn't a host name", _HOST_HINT)
        elif name == b"transfer-encoding":
            codings = value if codings is None else codings + b"," + value
    if hosts > 1 or (not hosts and version == "1.1"):
        # A proxy in front may have checked another one of them.
        raise _invalid(f"the request has {hosts or 'no'} Host header{'s' if hosts else ''}", _HOST_HINT)
    if codings is None:
        return
    if version == "1.0":
        raise _invalid("the HTTP/1.0 request has a Transfer-Encoding", "Send its body with a Content-Length.")
    if codings.lower() != b"chunked":
        raise HeadRefused(plain_problem(HTTPStatus.NOT_IMPLEMENTED, "Transfer-Encoding may be chunked, nothing else"))


def _is_host(value: bytes) -> bool:
    found = _HOST.fullmatch(value)
    if found is None or found[1] is None:
        return found is not None
    try:
        ipaddress.IPv6Address(found[1].decode())
    except ValueError:
        return False  # no URL can be made of it
    return True


def _invalid(message: str, hint: str) -> HeadRefused:
    return HeadRefused(problem_of(UsageError(message, hint=hint)))
