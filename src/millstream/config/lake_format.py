"""The setting `format` of a stream's lake: the formats that its tables may have, and the way out for one that isn't built."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator


def _refuse_parquet(value: object) -> object:
    if value == "parquet":
        raise ValueError(
            "must be one of 'delta', 'iceberg' or 'postgres', not 'parquet': files alone can't be committed together. The data "
            "files of 'delta' and 'iceberg' are Parquet, and docs/how-to/read-the-tables.md exports them as such"
        )
    return value


LakeFormat = Annotated[Literal["delta", "iceberg", "postgres"], BeforeValidator(_refuse_parquet)]
