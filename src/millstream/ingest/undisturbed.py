"""Work that Ctrl-C must not break off in its midst: a transaction of the catalog, a log that is opened or closed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Made = TypeVar("_Made")


def undisturbed(call: Callable[[], _Made]) -> _Made:
    """What a call gives, made where no signal's handler runs: a KeyboardInterrupt comes when the call has ended.

    Handlers run on the main thread alone; on any other the call is simply made.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    with ThreadPoolExecutor(1, thread_name_prefix="undisturbed") as other:
        return other.submit(call).result()
