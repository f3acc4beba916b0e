"""Work that Ctrl-C must not interrupt: a catalog transaction, opening or closing a log."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Made = TypeVar("_Made")


def uninterruptible(call: Callable[[], _Made]) -> _Made:
    """Return a call's result, computed where no signal handler runs: a KeyboardInterrupt comes after the call.

    Handlers run on the main thread only; on any other thread the call is simply made. An interrupted
    call's result is lost: the call itself has to keep what must be kept.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    made: Future[_Made] = Future()
    interrupted: KeyboardInterrupt | None = None
    try:
        _begin(call, made)
    except KeyboardInterrupt as error:
        if made.cancel():
            raise  # it hasn't begun, and won't
        interrupted = error
    while not made.done():
        try:
            made.exception()
        except KeyboardInterrupt as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted
    return made.result()


def made_elsewhere(call: Callable[[], _Made]) -> Future[_Made]:
    """Return a future of a call on a thread of its own.

    Executors refuse work once the main thread has ended, though others go on.
    """
    made: Future[_Made] = Future()
    _begin(call, made)
    return made


def _begin(call: Callable[[], _Made], made: Future[_Made]) -> None:
    def make() -> None:
        if not made.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it, whatever it is
            made.set_exception(error)
        else:
            made.set_result(result)

    threading.Thread(target=make, name="uninterruptible", daemon=True).start()
