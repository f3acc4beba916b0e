"""A command run in this process: the same output and exit code, without a process's second of startup.

`tests.app.homes.run` tests that commands do the same as processes, and so do the tests in other folders that
start commands.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from millstream.cli.main import main

# A command's own process skips importing pandas; that has no effect once pyarrow has looked for pandas.
pa.array([1])
pa.scalar(1)


def command(
    *words: str, stdin: str = "", environ: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run `millstream WORDS` and return its outcome.

    Args:
        words: arguments as in a shell.
        stdin: the whole standard input.
        environ: variables that are set while the command runs.
        cwd: the working directory.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    before = sys.stdin, dict(os.environ)
    code: object = None
    try:
        sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode()), "utf-8")
        os.environ.update(environ or {})
        with (
            contextlib.chdir(cwd or Path.cwd()),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            main(list(words))
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.stdin, variables = before
        os.environ.clear()
        os.environ.update(variables)
    for said in (out, err):
        said.flush()
    assert isinstance(code, int), f"it ended with {code!r}"
    return subprocess.CompletedProcess(words, code, _bytes(out), _bytes(err))


def _bytes(said: io.TextIOWrapper) -> bytes:
    assert isinstance(said.buffer, io.BytesIO)
    return said.buffer.getvalue()
