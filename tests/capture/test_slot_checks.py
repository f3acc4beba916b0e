"""A slot that the log can't go on with: the error, and its way out."""

from __future__ import annotations

import pytest

from millstream.capture.slot import SlotState, check_slot
from millstream.errors import SourceError
from millstream.model.positions import Lsn
from millstream.testing.errors import coded


@pytest.mark.parametrize(
    ("reader", "way_out"), [(None, "Run `millstream slot drop`"), (4711, "give its stream a `slot` of its own")]
)
def test_a_slot_ahead_of_the_log_is_dropped_unless_another_home_reads_it(reader: int | None, way_out: str) -> None:
    """A copy of a home that runs was told to drop the original's slot, which is refused while it is read."""
    slot = SlotState("shop", "pgoutput", "shop", reader, Lsn(90), Lsn(100), "reserved", "", 0)
    with pytest.raises(SourceError, check=coded("slot_ahead")) as refused:
        check_slot(slot, name="shop", database="shop", reached=Lsn(50), on_standby=False)
    assert way_out in refused.value.hint
