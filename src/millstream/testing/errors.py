"""Checks of an error's code."""

from __future__ import annotations

from collections.abc import Callable

from millstream.errors import MillstreamError


def coded(*codes: str) -> Callable[[MillstreamError], bool]:
    """Return a `check` for `pytest.raises`: whether an error has one of these codes."""
    return lambda error: error.code in codes


def code_of(error: object) -> str | None:
    """Return the code of an error of Millstream; None for anything else."""
    return error.code if isinstance(error, MillstreamError) else None
