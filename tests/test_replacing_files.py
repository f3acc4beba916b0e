"""`private_files.replacing`: a file is replaced whole or not at all, by one process or several at once."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream.private_files import replace_file, replacing


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(pieces=st.lists(st.binary(max_size=5000), max_size=4), durable=st.booleans(), fails=st.booleans())
def test_the_new_content_is_there_whole_or_the_old_one_is(
    tmp_path: Path, pieces: list[bytes], durable: bool, fails: bool
):
    path = tmp_path / "facts.json"
    path.write_bytes(b"old")
    try:
        with replacing(path, durable=durable) as file:
            for piece in pieces:
                file.write(piece)
            assert path.read_bytes() == b"old"
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert path.read_bytes() == b"old"
    else:
        assert path.read_bytes() == b"".join(pieces)
    assert names(tmp_path) == ["facts.json"], "nothing is left over"


@pytest.mark.parametrize(("private", "mode"), [(True, 0o600), (False, 0o644)])
def test_a_new_file_is_private_unless_it_is_for_others(tmp_path: Path, private: bool, mode: int):
    before = os.umask(0o022)
    try:
        with replacing(tmp_path / "file", private=private) as file:
            file.write(b"1")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_a_file_that_is_there_stays_if_it_may_not_be_replaced(tmp_path: Path):
    path = tmp_path / "object"
    with replacing(path, over=False) as file:
        file.write(b"first")
    with pytest.raises(FileExistsError), replacing(path, over=False) as file:
        file.write(b"second")
    assert (path.read_bytes(), names(tmp_path)) == (b"first", ["object"])


def test_an_error_names_the_file_that_was_to_be_written(tmp_path: Path):
    with pytest.raises(FileNotFoundError) as caught:
        replace_file(tmp_path / "none" / "facts.json", b"1")
    assert caught.value.filename == str(tmp_path / "none" / "facts.json")


def test_writers_at_once_leave_the_content_of_one_of_them(tmp_path: Path):
    path = tmp_path / "age.json"
    contents = {bytes([65 + number]) * 9000 for number in range(8)}

    def write(content: bytes) -> None:
        for _ in range(20):
            replace_file(path, content, durable=False)
            assert path.read_bytes() in contents

    with ThreadPoolExecutor(len(contents)) as pool:
        list(pool.map(write, contents))
    assert (path.read_bytes() in contents, names(tmp_path)) == (True, ["age.json"])
