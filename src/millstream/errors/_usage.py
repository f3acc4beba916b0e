"""Errors of calls and of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from millstream.errors._root import Code, MillstreamError, Retry


class UsageError(MillstreamError):
    """The call or the configuration is wrong; nothing was touched."""

    code = "usage"
    exit_code = 2
    codes: ClassVar[Mapping[str, Code]] = {
        "home_not_found": Code(
            "No home was named and none was found.",
            hint="Name a home with --home DIR or MILLSTREAM_HOME, or create one with `millstream init`.",
            exit_code=2,
        ),
        "home_too_new": Code(
            "The home was written by a newer Millstream.",
            Retry.OPERATOR,
            "Upgrade this Millstream, or use the version that wrote the home.",
            exit_code=2,
        ),
        "missing_extra": Code(
            "A command needs an extra that isn't installed; details: extra.",
            Retry.OPERATOR,
            exit_code=2,
        ),
    }


class ConfigError(UsageError):
    """`millstream.toml` or an environment variable is wrong; details: file, line, key."""

    code = "config"
    retry = Retry.OPERATOR
    codes: ClassVar[Mapping[str, Code]] = {
        "hash_key_missing": Code(
            "A column is to be hashed, but its stream's source has no `hash_key`.",
            Retry.OPERATOR,
            'Set hash_key = "${NAME}" in [streams.S.source], and the variable to at least 16 random bytes.',
            exit_code=2,
        ),
        "key_not_excludable": Code(
            "A column of a table's key is to be excluded or redacted; details: table, column.",
            Retry.OPERATOR,
            "Hash the column instead: rows are told apart by their key.",
            exit_code=2,
        ),
        "rule_clash": Code(
            "A column has two rules, or a rule and a type in `[streams.S.types]`.",
            Retry.OPERATOR,
            "Keep one of them.",
            exit_code=2,
        ),
        "unknown_column": Code(
            "A rule names a column that its table never had; details: table, column.",
            Retry.OPERATOR,
            "Correct the column's name in [streams.S.tables].",
            exit_code=2,
        ),
        "unknown_table": Code(
            "A name in `[streams.S.tables]` isn't the name of one table.",
            Retry.OPERATOR,
            "Write the exact name, schema.table, in [streams.S.tables]: patterns aren't allowed there.",
            exit_code=2,
        ),
        "rule_not_captured": Code(
            "A rule is for a table that applications write.",
            Retry.OPERATOR,
            "Remove the rule: applications decide what they append.",
            exit_code=2,
        ),
        "lake_scheme_unsupported": Code(
            "A lake's `location` is in a kind of store in which lakes aren't tested.",
            Retry.OPERATOR,
            "Name a folder, or a store of a supported kind, in the lake's `location`.",
            exit_code=2,
        ),
        "storage_option_unknown": Code(
            "An option of a lake's object store has a name that isn't allowed.",
            Retry.OPERATOR,
            "Correct the option's name in [streams.S.lake.storage_options]; other settings are from the environment.",
            exit_code=2,
        ),
        "layout_unclear": Code(
            "The stream has a table with rules in a form that none of its known definitions explains; details: table.",
            Retry.OPERATOR,
            "Run `millstream tables retry T`: the table is copied again.",
            exit_code=2,
        ),
    }


class HomeBusy(MillstreamError):
    """Another process uses the home, or this part of it; details: pid."""

    code = "home_busy"
    retry = Retry.OPERATOR
    default_hint = "Stop the process that uses the home first; `millstream status` shows it."


class UnknownStream(UsageError):
    """The home has no stream of that name, or has several and none was named."""

    code = "unknown_stream"


class UnknownTable(UsageError):
    """The stream has no table of that name."""

    code = "unknown_table"
    default_hint = "Run `millstream tables` to list the stream's tables."


class InvalidQuery(UsageError):
    """The SQL given to `query` failed; the message is the engine's."""

    code = "invalid_query"
