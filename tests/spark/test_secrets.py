"""Secrets of `[spark.conf]` reach Spark, but not its process's arguments, which every user of the machine can read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.lake.layout import LakeLayout
from millstream.spark.session import SparkOptions

# A process of its own: an existing session of other tests would be reused as it is.
START = """
import json, sys
from pathlib import Path
from pyspark.sql import SparkSession
from millstream.spark.session import SparkOptions, open_context
conf = json.loads(sys.argv[2])
open_context(SparkOptions(Path(sys.argv[1]), master="local[1]", conf=conf))
spark = SparkSession.builder.getOrCreate()
words = []
for file in Path("/proc").glob("[0-9]*/cmdline"):
    try:
        words.append(file.read_bytes().replace(b"\\0", b" ").decode(errors="replace"))
    except OSError:
        pass
java = [line for line in words if sys.argv[1] in line and "java" in line]
hadoop = spark.sparkContext._jsc.hadoopConfiguration()
print(json.dumps([java, {key: spark.sparkContext.getConf().get(key) for key in conf}, hadoop.get("fs.s3a.secret.key")]))
spark.stop()
"""


@pytest.mark.long
def test_a_secret_is_not_among_the_words_of_sparks_process(tmp_path: Path) -> None:
    conf = {
        "spark.hadoop.fs.s3a.secret.key": "PASSWORD",
        "spark.hadoop.javax.jdo.option.ConnectionURL": "jdbc:postgresql://h/db?password=PASSWORD",
        "spark.hadoop.fs.s3a.endpoint": "http://127.0.0.1:9000",
    }
    done = subprocess.run(
        [sys.executable, "-c", START, str(tmp_path / "spark"), json.dumps(conf)],
        stdout=subprocess.PIPE, text=True, timeout=300, check=True,
    )  # fmt: skip
    java, known, secret = json.loads(done.stdout)
    jvm = [line for line in java if "org.apache.spark" in line]
    assert jvm, java
    assert not [line for line in jvm if "PASSWORD" in line]
    assert known == conf
    assert secret == "PASSWORD"


def test_options_that_hold_secrets_are_not_in_what_is_printed_of_them() -> None:
    options = SparkOptions(Path("work"), conf={"spark.hadoop.fs.s3a.secret.key": "PASSWORD"})
    assert "PASSWORD" not in repr(options)
    fields = LakeLayout.__dataclass_fields__
    assert not fields["storage_options"].repr
