"""The reasons of a query's answer, as its header has them."""

from __future__ import annotations

import json
import time

import pytest

from millstream.model.query_reasons import Reason, as_header, as_json


@pytest.mark.parametrize("chars", [0, 7, 100, 9_000])
def test_a_header_has_as_many_of_the_first_reasons_as_have_room(chars: int) -> None:
    for count in (0, 1, 60, 200):
        reasons = as_json([Reason("copying", f"public.t{number}", "x" * chars) for number in range(count)])
        kept, found = json.loads(as_header(reasons)), json.loads(reasons)
        assert kept == found[: len(kept)]
        assert len(as_header(reasons)) <= 8192
        assert len(kept) == count or len(json.dumps(found[: len(kept) + 1])) > 8192


def test_the_reasons_of_thousands_of_tables_are_cut_soon() -> None:
    """For three thousand tables that are copied, each list of tables took the server seconds."""
    reasons = as_json([Reason("copying", f"public.t{number}", "x" * 80) for number in range(3_000)])
    began_s = time.process_time()
    as_header(reasons)
    assert time.process_time() - began_s < 0.5
