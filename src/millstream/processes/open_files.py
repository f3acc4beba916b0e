"""The number of files and connections that this process may have open."""

from __future__ import annotations

import contextlib
import resource
import sys


def raise_open_files() -> int:
    """Raise the limit of open files to what the system allows, and return it: the default is commonly 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS has another limit below the hard one
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
