"""A lake keeps its format: a table whose folder has another format's metadata isn't taken for one that isn't there."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from millstream.errors import LakeError
from millstream.lake.layout import LakeLayout


def check_format(layout: LakeLayout, path: str, of_another: Literal["metadata", "_delta_log"]) -> None:
    """Refuse a folder of this machine that has the metadata of another format.

    Raises:
        LakeError (`lake_of_another_format`): it has.
    """
    if "://" not in path and (Path(path) / of_another).is_dir():
        theirs = "delta" if of_another == "_delta_log" else "iceberg"
        raise LakeError(
            f"{path} is a table of format {theirs}, and the lake's format is {layout.format} now",
            code="lake_of_another_format",
            path=path,
        )
