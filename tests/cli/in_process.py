"""A command in this process, from its words to its exit code: what it says is the same, without the second that a process takes to begin.

That it does all of this as a process too is for `tests.app.homes.run`, and for each command that the other rooms' tests start.
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

# What leaves pandas out of a command's own process changes nothing where pyarrow has looked for it already.
pa.array([1])
pa.scalar(1)


def command(
    *words: str, stdin: str = "", environ: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    """What became of `millstream WORDS`.

    Args:
        words: as in a shell.
        stdin: all that there is to read.
        environ: added to the variables for as long as it runs.
        cwd: where it runs.
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
