"""A lake's Delta tables moved to another place: they hold no addresses, so copying their files is all."""

from __future__ import annotations

from collections.abc import Callable

from millstream.errors import LakeError
from millstream.lake.commit_cuts import last_cut
from millstream.lake.layout import LakeLayout
from millstream.model.addresses import mask_address


class DeltaMove:
    """See `TablesMove`."""

    def __init__(self, old: LakeLayout, new: LakeLayout) -> None:
        self._old, self._new = old, new
        self.is_done = old.root == new.root

    def is_copied(self, path: str) -> bool:  # noqa: ARG002 - all are
        return True

    def write(self) -> None:
        """See `TablesMove`: both places must have the same last cut, through the tables' logs, as the pipeline reads them."""
        if last_cut(self._old) != last_cut(self._new):
            raise LakeError(
                f"the lake at {mask_address(self._new.root)} isn't the one that was copied", path=self._new.root
            )

    def switch(self, last: Callable[[], None]) -> None:
        last()
