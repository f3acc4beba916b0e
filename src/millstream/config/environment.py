"""The environment's layer of a configuration: `MILLSTREAM_<SECTION>__<KEY>`, as pydantic-settings reads such variables."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from millstream.config.model import Config
from millstream.config.toml_lines import KeyPath

ENV_PREFIX: Final = "MILLSTREAM_"


class UnreadableVariable(Exception):
    """A variable's value isn't the JSON that its key takes; `name` is the variable, or the prefix if it's unknown."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def environment_values(
    environ: Mapping[str, str], named: Collection[str] = ()
) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Return the values that variables set, as nested dicts, and the variable of each key.

    A variable of an unknown section has a key, too, without a value in it: validation rejects the section.

    Args:
        named: those that the file names: one of an unknown section has no key, because it is meant for there.

    Raises:
        UnreadableVariable: a variable holds no value of its kind.
    """
    names = {name.lower(): name for name in environ if name.upper().startswith(ENV_PREFIX)}
    try:
        values: dict[str, Any] = _Environment(_Settings, environ)()
    except SettingsError as error:
        name = next((name for name in names.values() if not _is_readable(name, environ[name])), ENV_PREFIX)
        raise UnreadableVariable(name) from error
    variables: dict[KeyPath, str] = {}
    for low, name in names.items():
        path: KeyPath = tuple(_without_prefix(low).split("__"))
        if path[0] in Config.model_fields or (len(path) > 1 and name not in named):
            variables[path] = name
    for path, name in list(variables.items()):
        for key in _keys_within(path, _value_at(values, path)):
            variables.setdefault(key, name)
    unknown: dict[str, Any] = {str(path[0]): {} for path in variables}
    return unknown | {name: value for name, value in values.items() if name in Config.model_fields}, variables


def _is_readable(name: str, value: str) -> bool:
    try:
        _Environment(_Settings, {name: value})()
    except SettingsError:
        return False
    return True


def _value_at(values: Any, path: KeyPath) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _keys_within(path: KeyPath, value: Any) -> Iterator[KeyPath]:
    """Yield the paths of the keys of a table that a variable holds as JSON."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from _keys_within((*path, key), inner)


def _without_prefix(name: str) -> str:
    return name.removeprefix(ENV_PREFIX.lower())


class _Settings(Config, BaseSettings):
    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="ignore")


class _Environment(EnvSettingsSource):
    """pydantic-settings' reading of variables, over a given environment."""

    def __init__(self, settings: type[BaseSettings], environ: Mapping[str, str]) -> None:
        self._given = environ
        super().__init__(settings)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {name.lower(): value for name, value in self._given.items()}
