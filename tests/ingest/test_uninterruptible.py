"""Calls that no signal breaks off."""

from __future__ import annotations

import signal
import threading
from functools import partial

import pytest

from millstream.ingest.uninterruptible import uninterruptible


class TimeLimit(Exception):
    """An application's own, raised by its handler of a signal."""


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, TimeLimit])
def test_what_a_signals_handler_raises_comes_after_the_call(kind: type[BaseException], request: pytest.FixtureRequest):
    """Regression: only Ctrl-C did. After a time limit the call went on, while the next one began."""

    def raises(*_: object) -> None:
        raise kind

    request.addfinalizer(partial(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, raises)))
    main, left, made = threading.main_thread().ident, threading.Event(), []
    assert main is not None

    def call() -> None:
        signal.pthread_kill(main, signal.SIGUSR1)
        assert left.wait(60)
        made.append(True)

    with pytest.raises(kind):
        uninterruptible(call, leave=left.set)
    assert made == [True]


def test_a_failure_of_the_call_is_raised_itself():
    failure = ValueError("it")

    def call() -> None:
        raise failure

    with pytest.raises(ValueError, match="it") as raised:
        uninterruptible(call)
    assert raised.value is failure
