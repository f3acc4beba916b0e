"""Threads with an owner: each has a name, ends when it is told to, and loses no failure.

No other module starts a thread (`scripts/house_rules.py`).
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Final, ParamSpec, Self, TypeVar

import structlog

P = ParamSpec("P")
T = TypeVar("T")

logger = structlog.get_logger("millstream")

_NO_THREAD: Final = "can't start new thread"


class Worker:
    """A daemon thread that calls `step`, again for as long as it returns True, until it is stopped.

    A failure of the step ends the thread and is kept in `failure`. It is logged at once, unless the owner takes it by
    `on_failure`; `check`, and the end of a `with` block, raise it on the owner's thread.

    Args:
        step: the work. If it returns anything but True, it was the last.
        every_s: seconds to wait before each step.
        stop: an event of the owner's that ends this wait, and so the thread; several workers may have the same.
        on_failure: called on the thread with the failure, in place of the log.

    Concurrency: any thread may call.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], object],
        *,
        every_s: float = 0.0,
        stop: threading.Event | None = None,
        on_failure: Callable[[BaseException], object] | None = None,
    ) -> None:
        self.name: Final = name
        self.failure: BaseException | None = None
        self.ended: Final = threading.Event()
        """Set once the last step is over; not before `start`."""
        self.stopping: Final = threading.Event()
        """Set by `stop`, for a step that waits."""
        self._step = step
        self._every_s = every_s
        self._waits_on = self.stopping if stop is None else stop
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Self:
        """Start the thread; once only. Raises `OSError` (EAGAIN) if the system lets this process have no more threads."""
        with _limited():
            self._thread.start()
        return self

    def stop(self) -> None:
        """Ask the thread to end after its current step. It doesn't wait for that: see `join`."""
        self.stopping.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread's end, for so many seconds at most; return whether it has ended, or never began."""
        if self._thread.ident is None:
            return True
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        # First by the event: in Python 3.11 a signal makes a thread that was joined look as if it had ended.
        if not self.ended.wait(timeout_s):
            return False
        self._thread.join(None if end_s is None else max(0.0, end_s - time.monotonic()))
        return True

    @property
    def is_alive(self) -> bool:
        """Whether it was started and hasn't ended."""
        return self._thread.ident is not None and not self.ended.is_set()

    def check(self) -> None:
        """Raise the failure, if there is one."""
        if self.failure is not None:
            raise self.failure

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, *_: object) -> None:
        self.stop()
        self.join()
        if kind is None:
            self.check()

    def _run(self) -> None:
        try:
            while not self.stopping.is_set() and not (self._every_s and self._waits_on.wait(self._every_s)):
                if self.stopping.is_set() or self._step() is not True:
                    break
        except BaseException as error:
            self.failure = error
            if self._on_failure is None:
                logger.exception("a thread failed", thread=self.name)
            else:
                self._on_failure(error)
        finally:
            self.ended.set()


@contextmanager
def _limited() -> Iterator[None]:
    """Raise what the system told, which passes, in place of Python's error, which would be taken for a bug."""
    try:
        yield
    except RuntimeError as error:
        if str(error) != _NO_THREAD:
            raise
        raise OSError(errno.EAGAIN, "no more threads can be started") from error


class Pool(ThreadPoolExecutor):
    """An executor whose `submit` fails as `Worker.start` does; the call may be made all the same."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `ThreadPoolExecutor`."""
        with _limited():
            return super().submit(fn, *args, **kwargs)


@contextmanager
def watching(
    name: str, every_s: float, look: Callable[[], bool], *, stop: threading.Event | None = None
) -> Iterator[threading.Event]:
    """Look repeatedly on a thread while the block lasts; yield an event that is set when the looking ends.

    It ends when `look` returns False or fails, when `stop` is set, and with the block. A failure is raised at the
    block's end.

    Args:
        every_s: seconds between looks, and before the first.
        look: returns whether to look again.
        stop: ends it at once.
    """
    with Worker(name, look, every_s=every_s, stop=stop) as worker:
        yield worker.ended


class Crew:
    """Daemon threads that make calls in turn, begun as they are needed, so many at most.

    Executors join their threads at the process's end, so a call that hangs keeps the process from ending.

    Concurrency: any thread may call.
    """

    def __init__(self, name: str, count_max: int) -> None:
        self._name = name
        self._count_max = count_max
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._unfinished = self._count = 0
        self._is_closed = False

    def submit(self, call: Callable[[], object]) -> None:
        """Have a call made; a failure of it is logged. Nothing is done after `close`.

        Raises `OSError` (EAGAIN) if there is no thread and none can be started: the call isn't made then.
        """
        with self._lock:
            if self._is_closed:
                return
            if self._unfinished >= self._count < self._count_max:
                try:
                    Worker(self._name, self._step).start()
                    self._count += 1
                except OSError:
                    if not self._count:
                        raise
            self._unfinished += 1
            self._calls.put(call)

    def close(self) -> None:
        """Take no more calls; the threads end once the earlier ones are made. It doesn't wait for that."""
        with self._lock:
            self._is_closed = True
            for _ in range(self._count):
                self._calls.put(None)

    def _step(self) -> bool:
        call = self._calls.get()
        if call is None:
            return False
        try:
            call()
        except Exception:
            logger.exception("a call on a thread failed", thread=self._name)
        with self._lock:
            self._unfinished -= 1
        return True


def call_in_thread(name: str, call: Callable[[], T], made: Future[T] | None = None) -> Future[T]:
    """Call on a thread of its own; the future has the result or the failure, and can be cancelled until it begins.

    Executors refuse work once the main thread has ended, though others go on.

    Args:
        made: the future to use, for a caller that may be interrupted before it has the returned one.
    """
    made = Future() if made is None else made
    Worker(name, partial(_make, call, made)).start()
    return made


def call_apart(name: str, call: Callable[[], T]) -> Future[T]:
    """Call as `call_in_thread`, or at once if the system refuses a thread: for an end, which must come all the same."""
    made: Future[T] = Future()
    try:
        return call_in_thread(name, call, made)
    except OSError:
        _make(call, made)
        return made


def _make(call: Callable[[], T], made: Future[T]) -> None:
    if not made.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - the caller gets it, whatever it is
        made.set_exception(error)
    else:
        made.set_result(result)
