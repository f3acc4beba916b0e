"""Refusals of the operating system: bytes that a disk can't give back, files of another user."""

from __future__ import annotations

from millstream.errors._root import MillstreamError, Retry


class HomeUnreadable(MillstreamError):
    """A file or folder of the home can't be read by this user; details: path."""

    code = "home_unreadable"
    retry = Retry.OPERATOR
    default_hint = "Run as the user that the home belongs to, or give this user the file."


class IoFailed(MillstreamError):
    """The operating system failed a call on a file, a disk or a connection; details: path (None where it names none), errno."""

    code = "io_failed"
    retry = Retry.OPERATOR
    default_hint = (
        "Look into the operating system's log (`dmesg`) for the disk or the connection, mend that, and repeat the call."
    )
