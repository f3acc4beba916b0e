"""Errors of delta-rs, pyarrow and files, translated to ours. A store's refusal is read from their text, of whatever class.

A missing bucket comes as a missing file among others, which must not be taken for one of the table's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pyarrow as pa
from deltalake.exceptions import CommitFailedError, DeltaError, SchemaMismatchError

from millstream.errors import LakeConflict, LakeError, LakeFilesGone, LakeUnavailable
from millstream.model.addresses import mask_address

_ANSWERED: Final = re.compile(r"<Code>(\w+)</Code>(?:\s*<Message>([^<]{0,300})</Message>)?")
"""The body of an error as S3, Google's store and Azure's send it."""
_BY_ARROW: Final = re.compile(
    r"AWS Error (?!UNKNOWN)(\w+) during \w+ operation: ([^<]{0,300})|ExceptionName: (\w+) Message: ([^<]{0,300})"
)
"""An error of S3 as pyarrow reports it: `NO_SUCH_BUCKET`, or S3's own name for one that its library doesn't know."""
_CODES: Final = {
    "lake_bucket_missing": frozenset({"NoSuchBucket", "ContainerNotFound"}),
    "lake_credentials": frozenset(
        {
            "AuthenticationFailed",
            "ExpiredToken",
            "InvalidAccessKeyId",
            "InvalidAuthenticationInfo",
            "InvalidToken",
            "NoAuthenticationInformation",
            "SignatureDoesNotMatch",
            "TokenRefreshRequired",
        }
    ),
    "lake_forbidden": frozenset(
        {
            "AccessDenied",
            "AccountProblem",
            "AllAccessDisabled",
            "AuthorizationFailure",
            "AuthorizationPermissionMismatch",
        }
    ),
}
_SAID: Final = {
    "lake_bucket_missing": "the bucket doesn't exist",
    "lake_credentials": "the object store doesn't accept the keys",
    "lake_forbidden": "the keys may not do this",
}
_TLS_DIFFERS: Final = re.compile(
    r"InvalidContentType|wrong version number|HTTP request (?:was sent )?to (?:an )?HTTPS (?:server|port)",
    re.IGNORECASE,
)
"""An answer without TLS to a request with it, as delta-rs and pyarrow report it; and how MinIO and nginx answer the reverse."""
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_OF_THE_MACHINE: Final = re.compile(
    r"https?://(?:169\.254\.169\.254|metadata\.google\.internal|\[fd00:ec2::254\])[:/]|occurred while loading credentials"
)
"""Where a machine in a cloud is asked for its role's keys, if no others are given."""


def plain_text(error: BaseException | str) -> str:
    """Return an error's text on one line, without the colours that delta-rs gives it and obstore's dump of its own values."""
    told, _, _ = _COLOUR.sub("", str(error)).partition("Debug source:")
    return " ".join(told.split())


def store_error(path: str, error: BaseException) -> LakeUnavailable | None:
    """Return what an object store refused; None if the error is another one."""
    if "://" not in path:
        return None
    text = str(error)
    if _OF_THE_MACHINE.search(text):
        return no_keys(path)
    if _TLS_DIFFERS.search(text):
        told = "the address says https:// and the store has no TLS, or http:// and the store needs it"
        return LakeUnavailable(f"{mask_address(path)}: {told}", code="lake_tls_differs", path=path)
    for name, words in _answers(text):
        for code, names in _CODES.items():
            if name in names:
                told = f"{name}: {words}" if words else name
                return LakeUnavailable(f"{mask_address(path)}: {_SAID[code]} ({told})", code=code, path=path)
    return None


def no_keys(path: str) -> LakeUnavailable:
    """Return the error for a store of which no keys are known."""
    return LakeUnavailable(
        f"{mask_address(path)}: there are no keys for the object store, and this machine has no role that gives them",
        code="lake_credentials",
        path=path,
    )


def _answers(text: str) -> Iterator[tuple[str, str]]:
    """Yield the names of a store's errors in a text, with their descriptions."""
    yield from _ANSWERED.findall(text)
    for known, words, other, others_words in _BY_ARROW.findall(text):
        yield other or "".join(map(str.capitalize, known.split("_"))), (words or others_words).strip()


@contextmanager
def lake_errors(path: str) -> Iterator[None]:
    """Translate errors of delta-rs and of files."""
    try:
        yield
    except (DeltaError, OSError) as error:
        raise _translated(path, error) from error
    except pa.ArrowException as error:
        raise LakeError(f"{path}: {error}", path=path) from error


def _translated(path: str, error: Exception) -> LakeError:
    if (refused := store_error(path, error)) is not None:
        return refused
    told = plain_text(error)
    match error:
        case CommitFailedError():
            return LakeConflict(f"another writer committed to {path} first: {told}", path=path)
        case SchemaMismatchError():
            return LakeError(f"{path} can't take these columns: {told}", code="lake_schema_conflict", path=path)
        case FileNotFoundError():
            return LakeFilesGone(f"a file of {path} is gone: {told}", path=path)
        case _:
            return LakeUnavailable(f"{path}: {told}", path=path)
