"""The catalog's migrations, run by Alembic from inside the package: no `alembic.ini`, no command of its own.

Revisions are named by four digits that grow, so that newer and older ones can be compared. A migration is never changed
after its release; a new one follows it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sqlalchemy import Connection

_HERE: Final = Path(__file__).parent


def upgrade(connection: Connection, scripts: Path = _HERE) -> None:
    """Run every migration of a folder that is missing, in the connection's open transaction."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(scripts).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
