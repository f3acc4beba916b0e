"""The audit log: a line for each action that was asked for in the console, and one for its end."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from millstream.errors import AccessError
from millstream.private_files import make_folder, open_private

if TYPE_CHECKING:
    from millstream.home.paths import HomePaths


def add_audit_line(home: HomePaths, **facts: Any) -> None:
    """Add a line with the time and some facts.

    Raises:
        AccessError (`audit_unwritable`): it can't be written. Details: the `outcome` of the facts.
    """
    line = json.dumps({"at": datetime.now(UTC).isoformat(timespec="milliseconds"), **facts})
    try:
        make_folder(home.audit_file.parent)
        with open(home.audit_file, "a", opener=open_private, encoding="utf-8") as file:
            file.write(f"{line}\n")
    except OSError as error:
        raise AccessError(
            f"the audit log {home.audit_file} can't be written: {error}",
            code="audit_unwritable",
            outcome=facts["outcome"],
        ) from error
