"""Validation of the configuration: which keys and values are refused, and the error that reports them.

The model has the rules of single values, and `stream_checks` and `rule_checks` those between several. Here a refusal gets its
words: the place, the allowed keys, the key that was probably meant. A value is never shown, as it may be a secret.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args, get_origin

from pydantic import BaseModel, ValidationError

from millstream.config.masking import mask
from millstream.config.model import Config
from millstream.config.toml_lines import KeyPath
from millstream.errors import ConfigError

_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+\Z")


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake: its place, its key, and what is wrong."""

    place: str
    key: str
    what: str
    line: int | None = None
    variable: str | None = None
    """The environment variable that would fix it."""
    code: str = "config"

    def __str__(self) -> str:
        return f"{self.place}: {self.key}: {self.what}" if self.key else f"{self.place}: {self.what}"


def validate(data: dict[str, Any], *, strict: bool) -> tuple[Config | None, list[tuple[KeyPath, str]]]:
    """Return the configuration and no mistakes, or None and every mistake: the path of its key, and what is wrong.

    Args:
        strict: for the file alone, which may lack keys that variables set. Otherwise text is converted, as variables
            hold only text.
    """
    try:
        return Config.model_validate(data, strict=strict), []
    except ValidationError as error:
        mistakes = []
        for mistake in error.errors():
            path = tuple(part for part in mistake["loc"] if part != "[key]")
            if not (strict and mistake["type"] == "missing"):
                mistakes.append((path, _say(path, dict(mistake))))
        return None, mistakes


def config_error(file: Path, mistakes: list[Mistake]) -> ConfigError:
    """Return the error for the mistakes in a file."""
    first = mistakes[0]
    exports = " ".join(dict.fromkeys(f"{mistake.variable}=…" for mistake in mistakes if mistake.variable))
    hints = [f"export {exports}"] if exports else []
    settings = [mistake.place.partition("env ")[2] for mistake in mistakes if mistake.variable is None]
    if settings:
        wrong = " and ".join(dict.fromkeys(setting or str(file) for setting in settings))
        hints.append(f"Mend {wrong}; `millstream config show` prints the configuration once it is right.")
    return ConfigError(
        "\n".join(map(str, mistakes)),
        code=first.code,
        hint="\n".join(hints),
        file=str(file),
        line=first.line,
        key=first.key,
        mistakes=[str(mistake) for mistake in mistakes],
    )


def _say(path: KeyPath, mistake: dict[str, Any]) -> str:
    """Return a pydantic mistake in our words; never the value, which may be a secret, unless it is one of a few."""
    kind, context = mistake["type"], mistake.get("ctx", {})
    if kind == "extra_forbidden":
        if path[0] == "streams" and path[2:3] == ("tables",) and path[4:] == ("merge",):
            return f"unknown key; merge rules of a table belong in [{key_text((*path[:2], 'merge', path[3]))}]"
        allowed = allowed_keys(path[:-1])
        near = nearest_key(str(path[-1]), allowed)
        meant = f"; did you mean {near}?" if near else ""
        return f"unknown key{meant or ';'} allowed here: {', '.join(allowed) or 'nothing'}"
    if kind == "missing":
        return "is required"
    if kind == "value_error":
        return str(context.get("error", mistake["msg"]))
    if kind == "literal_error":
        return f"must be one of {context['expected']}, not {mask(path, mistake['input'])!r}"
    names = {
        "string_type": "text in quotes",
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "int_parsing": "a whole number",
        "float_type": "a number",
        "float_parsing": "a number",
        "list_type": 'a list such as ["…"]',
        "dict_type": "a table",
        "model_type": "a table",
        "model_attributes_type": "a table",
        "bool_type": "true or false",
        "too_short": f"a list of at least {context.get('min_length')}",
        "greater_than": f"more than {context.get('gt')}",
        "greater_than_equal": f"{context.get('ge')} or more",
        "less_than": f"less than {context.get('lt')}",
        "less_than_equal": f"at most {context.get('le')}",
        "string_too_short": "text that isn't empty",
    }
    said = names.get(kind)
    return f"must be {said}" if said else str(mistake["msg"])


def nearest_key(key: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed key that a mistyped one probably means; None if there is none."""
    return next(iter(difflib.get_close_matches(key, list(allowed), n=1)), None)


def allowed_keys(path: KeyPath) -> list[str]:
    """Return the keys of the table at a path; none if it is no table, or takes any."""
    model = _type_at(path)
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def takes_any_key(path: KeyPath) -> bool:
    """Return whether the table at a path is one of free names, such as `spark.conf`."""
    return bool(path) and get_origin(_type_at(path)) is dict


def _type_at(path: KeyPath) -> Any:
    model: Any = Config
    for part in path:
        if isinstance(model, type) and issubclass(model, BaseModel):
            fields = model.model_fields
            model = fields[str(part)].annotation if str(part) in fields else None
            if type(None) in get_args(model):  # a section that need not be there
                model = get_args(model)[0]
        else:
            model = next(iter(get_args(model)[1:]), None)
    return model


def key_text(path: KeyPath) -> str:
    """Return a key's path as TOML writes it: `streams.shop.shards."public.big"`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if _BARE_KEY.match(part) else f'"{part}"')
    return text
