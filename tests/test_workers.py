"""`Worker`, `watching`, `call_in_thread` and `Crew`: how a thread ends, and where its failure goes."""

from __future__ import annotations

import errno
import threading
import time
from concurrent.futures import Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from millstream.wal.files import error_of_os
from millstream.workers import Crew, Pool, Worker, call_apart, call_in_thread, watching

PATIENCE_S = 20.0


class Bug(Exception):
    """The error that a step fails with."""


@settings(deadline=None)
@given(steps=st.integers(1, 20), ends=st.sampled_from(["done", "fails", "stop"]), takes=st.booleans())
def test_a_worker_steps_until_it_is_done_stopped_or_fails_and_the_failure_reaches_its_owner(
    steps: int, ends: str, takes: bool
):
    taken: list[BaseException] = []
    made = 0

    def step() -> bool:
        nonlocal made
        made += 1
        if made < steps:
            return True
        if ends == "fails":
            raise Bug
        if ends == "stop":
            worker.stop()
        return ends == "stop"

    worker = Worker("steps", step, on_failure=taken.append if takes else None)
    assert worker.join(0.0), "it never began"
    assert not worker.is_alive
    with capture_logs() as logs:
        assert worker.start().join(PATIENCE_S)

    assert (made, worker.is_alive, worker.ended.is_set()) == (steps, False, True)
    if ends != "fails":
        worker.check()
        assert (worker.failure, taken, logs) == (None, [], [])
        return
    with pytest.raises(Bug):
        worker.check()
    assert taken == ([worker.failure] if takes else [])
    assert [log["thread"] for log in logs] == ([] if takes else ["steps"]), "it is logged unless the owner takes it"


def divide_after(worker: Worker) -> float:
    worker.ended.wait(PATIENCE_S)
    return 1 / 0


def test_a_block_raises_the_failure_of_its_worker_and_its_own_before_that():
    def fail() -> None:
        raise Bug

    with pytest.raises(Bug), Worker("fails", fail, on_failure=id) as worker:
        worker.ended.wait(PATIENCE_S)
    with pytest.raises(ZeroDivisionError), Worker("fails", fail, on_failure=id) as worker:
        divide_after(worker)


@pytest.mark.parametrize("shared", [True, False])
def test_a_stop_ends_the_wait_between_steps(shared: bool):
    stop = threading.Event() if shared else None
    worker = Worker("waits", lambda: True, every_s=600.0, stop=stop).start()
    assert not worker.join(0.05)
    assert worker.is_alive
    if stop is None:
        worker.stop()
    else:
        stop.set()
    assert worker.join(PATIENCE_S)
    worker.check()


def test_a_join_gives_up_at_its_deadline():
    goes_on = threading.Event()
    worker = Worker("busy", goes_on.wait).start()
    began = time.monotonic()
    worker.stop()
    assert not worker.join(0.1)
    assert 0.09 < time.monotonic() - began < PATIENCE_S
    goes_on.set()
    assert worker.join(PATIENCE_S)


@pytest.mark.parametrize("why", ["look", "stop", "block", "bug"])
def test_a_watch_ends_with_its_reason_and_says_so(why: str):
    looks: list[str] = []
    stop = threading.Event()

    def look() -> bool:
        looks.append(threading.current_thread().name)
        if why == "bug":
            raise Bug
        if why == "stop":
            stop.set()
        return why != "look"

    def watched() -> threading.Event:
        with watching("looks", 0.001, look, stop=stop) as ended:
            assert why == "block" or ended.wait(PATIENCE_S)
            while not looks:
                time.sleep(0.001)
        return ended

    if why == "bug":
        with pytest.raises(Bug):
            watched()
    else:
        assert watched().is_set()
    assert set(looks) == {"looks"}
    seen = len(looks)
    time.sleep(0.01)
    assert len(looks) == seen, "nothing looks behind the block"


def test_a_call_in_a_thread_has_its_result_or_failure_in_the_future():
    assert call_in_thread("call", lambda: threading.current_thread().name).result(PATIENCE_S) == "call"
    with capture_logs() as logs, pytest.raises(ZeroDivisionError):
        call_in_thread("call", lambda: 1 // 0).result(PATIENCE_S)
    assert logs == []


def test_a_cancelled_call_is_not_made():
    made: Future[None] = Future()
    made.cancel()
    calls: list[int] = []
    call_in_thread("call", lambda: calls.append(1), made)
    time.sleep(0.01)
    assert (made.cancelled(), calls) == (True, [])


def test_a_call_apart_is_made_at_once_if_there_is_no_thread_for_it(monkeypatch: pytest.MonkeyPatch):
    def refused(_: Worker) -> Worker:
        raise OSError(errno.EAGAIN, "no more threads can be started")

    def name() -> str:
        return threading.current_thread().name

    assert call_apart("apart", name).result(PATIENCE_S) == "apart"
    monkeypatch.setattr(Worker, "start", refused)
    assert call_apart("apart", name).result(0) == name()
    assert isinstance(call_apart("apart", lambda: 1 // 0).exception(0), ZeroDivisionError)


def test_a_crew_makes_so_many_calls_at_a_time_and_each_that_came_before_its_end():
    crew = Crew("crew", 2)
    goes_on, at_once, most = threading.Event(), threading.Semaphore(0), threading.Semaphore(2)
    made: list[int] = []

    def call(number: int) -> None:
        assert threading.current_thread().daemon
        assert most.acquire(blocking=False), "three at a time"
        at_once.release()
        assert goes_on.wait(PATIENCE_S)
        most.release()
        made.append(number)
        raise Bug

    with capture_logs() as logs:
        for number in range(5):
            crew.submit(lambda number=number: call(number))
        assert at_once.acquire(timeout=PATIENCE_S)
        assert at_once.acquire(timeout=PATIENCE_S)
        crew.close()
        crew.submit(lambda: call(5))
        goes_on.set()
        until_s = time.monotonic() + PATIENCE_S
        while any(thread.name == "crew" for thread in threading.enumerate()) and time.monotonic() < until_s:
            time.sleep(0.001)
    assert sorted(made) == [0, 1, 2, 3, 4]
    assert len(logs) == 5


def test_a_lack_of_threads_is_told_as_the_systems_and_no_place_in_a_crew_is_lost(monkeypatch: pytest.MonkeyPatch):
    """Python's error is one of our bugs by its class; it ended the threads that keep consumers' state, for ever."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    crew, pool, calls = Crew("crew", 1), Pool(1), list[str]()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        for start in (
            Worker("one", int).start,
            lambda: crew.submit(lambda: calls.append("refused")),
            lambda: pool.submit(int),
        ):
            with pytest.raises(OSError, check=lambda error: error_of_os(error).code == "system_limit"):
                start()
    done = threading.Event()
    crew.submit(done.set)
    assert done.wait(PATIENCE_S)
    assert calls == [], "a call that was refused is made by no later one's thread"
    assert pool.submit(int).result(PATIENCE_S) == 0
    crew.close()
    pool.shutdown()


def test_a_crew_that_gets_no_further_thread_makes_its_calls_on_those_it_has(monkeypatch: pytest.MonkeyPatch):
    def refused(_: Worker) -> Worker:
        raise OSError(errno.EAGAIN, "no more threads can be started")

    crew, goes_on, done = Crew("crew", 2), threading.Event(), threading.Event()
    crew.submit(goes_on.wait)
    with monkeypatch.context() as patched:
        patched.setattr(Worker, "start", refused)
        crew.submit(done.set)
    goes_on.set()
    assert done.wait(PATIENCE_S)
    crew.close()
