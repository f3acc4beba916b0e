"""Failures reported by the operating system: bytes that a disk can't return, files of another user."""

from __future__ import annotations

from millstream.errors._root import MillstreamError, Retry


class HomeUnreadable(MillstreamError):
    """A file or folder of the home isn't readable by this user; details: path."""

    code = "home_unreadable"
    retry = Retry.OPERATOR
    default_hint = "Run as the user that the home belongs to, or give this user the file."


class IoFailed(MillstreamError):
    """The operating system failed a call on a file, a disk or a connection; details: path (None if unknown), errno."""

    code = "io_failed"
    retry = Retry.OPERATOR
    default_hint = (
        "Look into the operating system's log (`dmesg`) for the disk or the connection, mend that, and repeat the call."
    )
