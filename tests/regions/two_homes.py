"""Two homes that write one stream as regions 1 and 2, each with the other's log, in the test's own process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import millstream
from millstream.model.ids import RegionId, region_log_name

CONFIG = """
[streams.shop]
region = {region}
[streams.shop.log]
disk_used_max = 1.0
[streams.shop.keys]
"public.posts" = ["id"]
"notes" = ["id"]
[streams.shop.merge."posts"]
likes = "pn_counter"
tags = "union_set"
heat = "signal(1d)"
hidden = "hide"
"""


def made(folder: Path, region: int, config: str = CONFIG) -> Path:
    folder.mkdir(parents=True)
    (folder / "millstream.toml").write_text(config.format(region=region))
    return folder


def follow(home: Path, other: Path, region: int) -> None:
    """Do a follower's work: copy the other's log, byte for byte, with its marks."""
    target = home / "data" / "wal" / region_log_name("shop", RegionId(region))
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(other / "data" / "wal" / "shop", target)


@contextmanager
def both(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    one, two = made(tmp_path / "one", 1), made(tmp_path / "two", 2)
    with millstream.open(one) as home:
        home.append(
            "shop", "posts", [{"id": 1, "likes": 3, "title": "first", "tags": ["a"], "heat": 4.0, "hidden": False}]
        )
        home.append(
            "shop", "posts", [{"id": 1, "likes": 5, "title": "mended", "tags": ["b"], "heat": 2.0, "hidden": None}]
        )
        home.append("shop", "posts", [{"id": 2, "likes": 1, "title": "here alone"}])
    with millstream.open(two) as home:
        home.append(
            "shop",
            "posts",
            [{"id": 1, "likes": -2, "title": "of two", "tags": ["a", "c"], "heat": 1.0, "hidden": True, "more": "x"}],
        )
        home.append("shop", "posts", [{"id": 3, "likes": 7, "title": "there alone"}])
    follow(one, two, 2)
    follow(two, one, 1)
    yield one, two
