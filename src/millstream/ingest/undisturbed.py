"""Work that Ctrl-C must not break off in its midst: a transaction of the catalog, a log that is opened or closed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Made = TypeVar("_Made")


def undisturbed(call: Callable[[], _Made]) -> _Made:
    """What a call gives, made where no signal's handler runs: a KeyboardInterrupt comes when the call has ended.

    Handlers run on the main thread alone; on any other the call is simply made. Of a call that was interrupted nobody gets the result: what
    must be kept is kept by the call itself.
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
    """What a call will give, made on a thread of its own. Executors give out none once the main thread has ended, though others go on."""
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

    threading.Thread(target=make, name="undisturbed", daemon=True).start()
