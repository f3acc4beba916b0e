"""The environment's layer of a configuration: `MILLSTREAM_<SECTION>__<KEY>`, as pydantic-settings reads such variables."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from millstream.config.model import Config
from millstream.config.toml_lines import KeyPath

ENV_PREFIX: Final = "MILLSTREAM_"


class UnreadableVariable(Exception):
    """A variable's value can't be read as what its key takes; `name` is the variable, or the prefix if it's unknown."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(what)
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
        name = next((n for low, n in names.items() if _without_prefix(low) in str(error).lower()), ENV_PREFIX)
        raise UnreadableVariable(name, str(error)) from error
    variables: dict[KeyPath, str] = {}
    for low, name in names.items():
        path = tuple(_without_prefix(low).split("__"))
        if path[0] in Config.model_fields or (len(path) > 1 and name not in named):
            variables[path] = name
    unknown: dict[str, Any] = {str(path[0]): {} for path in variables}
    return unknown | {name: value for name, value in values.items() if name in Config.model_fields}, variables


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
