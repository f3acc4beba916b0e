"""A lake keeps its format: a table whose folder has another format's metadata isn't taken for one that isn't there."""

from __future__ import annotations

from typing import Literal

import pyarrow.fs as pafs

from millstream.errors import LakeError
from millstream.lake.data_files import storage_of
from millstream.lake.layout import LakeLayout


def check_format(layout: LakeLayout, path: str, of_another: Literal["metadata", "_delta_log"]) -> None:
    """Refuse a folder that has the metadata of another format; in an object store that is one request.

    Raises:
        LakeError (`lake_of_another_format`): it has.
        OSError: the store's refusal, which the caller translates.
    """
    if storage_of(layout, path).get_file_info(pafs.FileSelector(of_another, allow_not_found=True)):
        theirs = "delta" if of_another == "_delta_log" else "iceberg"
        raise LakeError(
            f"{path} is a table of format {theirs}, and the lake's format is {layout.format} now",
            code="lake_of_another_format",
            path=path,
        )
