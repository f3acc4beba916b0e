"""A real browser for tests: Chromium without a window, driven by its DevTools protocol over two pipes.

The protocol's messages are JSON texts, each ended by a null character; nothing has to be installed for it.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

VARIABLE: Final = "FORAGE_TEST_BROWSER"
NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
DEADLINE_S: Final = 60.0
WITH_PIPES: Final = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(pipe), fcntl.F_DUPFD, 10) for pipe in sys.argv[1:3]]
for number, pipe in enumerate(pipes, 3):
    os.dup2(pipe, number)
    os.close(pipe)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""A program that becomes the browser, with the pipes as descriptors 3 and 4."""
KEYS: Final = {"ArrowLeft": 37, "Tab": 9, "Enter": 13, "ArrowDown": 40, "ArrowUp": 38}
"""Numbers of the keys that write nothing."""


def browser_path() -> str | None:
    """Return the program of the browser: that of the variable, or the first on the PATH."""
    named = os.environ.get(VARIABLE)
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


class Chromium:
    """A browser with one page."""

    def __init__(self, program: str, profile: Path) -> None:
        its_input, commands = os.pipe()
        events, its_output = os.pipe()
        self._commands = os.fdopen(commands, "wb")
        self._events = os.fdopen(events, "rb")
        self._received = b""
        self._number = 0
        self.problems: list[str] = []
        """Uncaught exceptions, and errors in the console."""
        arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-IS", "-c", WITH_PIPES, str(its_input), str(its_output), program, *arguments),
                *("--remote-debugging-pipe", f"--user-data-dir={profile}", "--window-size=1180,1500", "about:blank"),
            ],
            pass_fds=(its_input, its_output),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(its_input)
        os.close(its_output)
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session: str | None = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._commands.close()
        self._events.close()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the page."""
        return self._call(method, self._session, **parameters)

    def open(self, address: str) -> None:
        """Go to an address."""
        self.call("Page.navigate", url=address)

    def before(self, script: str) -> None:
        """Run a script in each page that is opened from now on, before its own."""
        self.call("Page.addScriptToEvaluateOnNewDocument", source=script)

    def run(self, script: str) -> Any:
        """Return the value of an expression of the page."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression of the page is true."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not self.run(script):
            assert time.monotonic() < deadline_s, f"not within {DEADLINE_S} s: {script}"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """Press a key and let it go."""
        code = KEYS.get(key, ord(key[0].upper()))
        text = {"text": "\r"} if key == "Enter" else {} if key in KEYS else {"text": key}
        parameters = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **parameters, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **parameters)

    def click(self, selector: str) -> None:
        """Click with the mouse on the first element of a selector."""
        box = self.run(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)}); node.scrollIntoView({{block: 'center'}});"
            " const box = node.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def nodes(self) -> list[tuple[str, str]]:
        """Return the role and the name of each node that assistive technology meets."""
        tree = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node.get("ignored")
        ]

    def screenshot(self, path: Path) -> None:
        """Write a picture of the page."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            part = os.read(self._events.fileno(), 1 << 16)
            assert part, "the browser has ended"
            self._received += part
        text, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(parameters["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(parameters["entry"]["text"])
