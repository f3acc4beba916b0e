"""Asking the scheduler for short turns changes nothing else of a thread, and never fails."""

from __future__ import annotations

import os
import threading

from tests.capture.beside import Beside

from millstream.capture.stream._turns import ask_for_short_turns


def test_a_thread_keeps_its_policy_and_its_niceness():
    seen: list[tuple[int, int]] = []

    def ask() -> None:
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, 3)
        ask_for_short_turns()
        policy = os.sched_getscheduler(thread) if hasattr(os, "sched_getscheduler") else 0
        seen.append((policy, os.getpriority(os.PRIO_PROCESS, thread)))

    Beside(ask).ended()
    assert seen == [(0, 3)]
