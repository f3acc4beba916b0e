"""Loading `millstream.toml`: text, variables, environment, and the place of every value and every error.

There are three layers, the later wins: defaults, the file, and the environment's variables (`environment`). Every
mistake is a `ConfigError` that names file, line, key and the allowed values (`validation`); all mistakes of a file are
reported at once.
"""

from __future__ import annotations

import copy
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from millstream.config.commented_sections import section_meant
from millstream.config.environment import UnreadableVariable, environment_values
from millstream.config.interpolation import (
    MissingVariable,
    interpolate,
    interpolate_dsn,
    is_database,
    variables_in,
)
from millstream.config.masking import mask
from millstream.config.model import EMBEDDED_CATALOG, Config
from millstream.config.quantities import disk_bytes
from millstream.config.rule_checks import clashes_of_rules
from millstream.config.stream_checks import clashes, clashes_of_storage
from millstream.config.toml_lines import KeyPath, key_lines
from millstream.config.validation import (
    Mistake,
    allowed_keys,
    config_error,
    key_text,
    nearest_key,
    takes_any_key,
    validate,
)
from millstream.errors import ConfigError
from millstream.libpq import is_address
from millstream.model.ids import default_name

FILE_NAME: Final = "millstream.toml"
_NODE_TOKEN: Final = ("replication", "token")
_CONSUMER_KEYS: Final = 4
"""Length of a consumer's path: `streams.S.consumers.C`."""


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration, and the origin of each of its values."""

    config: Config
    file: Path
    origins: Mapping[KeyPath, str] = field(default_factory=dict)
    unset: Mapping[KeyPath, Mistake] = field(default_factory=dict)
    """Addresses of databases, and this node's token, that name an unset variable, and are kept as written; also settings
    of consumers, which `config` lacks then."""

    def catalog_address(self) -> str | None:
        """Return the address of the catalog's database; None if it is embedded.

        `ConfigError` if its variable isn't set.
        """
        url, path = self.config.catalog.url, ("catalog", "url")
        if path in self.unset:
            raise config_error(self.file, [self.unset[path]])
        if url != EMBEDDED_CATALOG and not is_address(url):
            raise config_error(self.file, [Mistake(self.origin(path), key_text(path), "is no PostgreSQL address")])
        return None if url == EMBEDDED_CATALOG else url

    def node_token(self) -> str | None:
        """Return the token that this node presents to others; None if there is none.

        `ConfigError` if its variable isn't set.
        """
        if _NODE_TOKEN in self.unset:
            raise config_error(self.file, [self.unset[_NODE_TOKEN]])
        return self.config.replication.token

    def unset_consumers(self, stream: str) -> dict[str, ConfigError]:
        """Return the consumers that `config` lacks because a variable of theirs isn't set, with the error, by name."""
        mistakes: dict[str, list[Mistake]] = {}
        for path, mistake in self.unset.items():
            if _is_of_consumer(path) and path[1] == stream:
                mistakes.setdefault(str(path[3]), []).append(mistake)
        return {name: config_error(self.file, some) for name, some in mistakes.items()}

    def items(self) -> Iterator[tuple[KeyPath, Any, str]]:
        """Yield every effective value with its path and origin (`millstream.toml:3`, `env NAME`, `default`), secrets masked."""
        yield from self._walk((), self.config)

    def _walk(self, path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any, str]]:
        if isinstance(value, BaseModel):
            for name in type(value).model_fields:
                yield from self._walk((*path, name), getattr(value, name))
        elif isinstance(value, dict) and (value or len(path) == 1):
            for name, item in value.items():
                yield from self._walk((*path, name), item)
        elif isinstance(value, list) and any(isinstance(item, BaseModel) for item in value):
            for number, item in enumerate(value):
                yield from self._walk((*path, number), item)
        else:
            yield path, mask(path, value), self.origin(path)

    def effective(self) -> Iterator[tuple[KeyPath, Any, str]]:
        """Yield as `items`, with the default names of a stream's source and the default views of its lake."""
        for path, value, origin in self.items():
            if value is None and path[-2:] in {("source", "publication"), ("source", "slot")}:
                yield path, default_name(str(path[1])), origin
            elif value is None and path[-2:] == ("lake", "views"):
                yield path, list(self.config.streams[str(path[1])].lake.shown), origin
            else:
                yield path, value, origin

    def origin(self, path: KeyPath) -> str:
        """Return a value's origin: its own place, or that of the table that holds it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins and (length == len(path) or self._is_leaf(path[:length])):
                return self.origins[path[:length]]
        return "default"

    def mistake(self, path: KeyPath, what: str) -> ConfigError:
        """Return the error for a value that only the home's state shows to be wrong."""
        origin = self.origin(path)
        place = origin if origin != "default" else self.file.name
        line = origin.rpartition(":")[2]
        return config_error(self.file, [Mistake(place, key_text(path), what, int(line) if line.isdigit() else None)])

    def _is_leaf(self, path: KeyPath) -> bool:
        return not any(other[: len(path)] == path and len(other) > len(path) for other in self.origins)


def load_config(file: Path, environ: Mapping[str, str] | None = None, *, needs_source: bool = True) -> LoadedConfig:
    """Read, complete and check a configuration.

    Args:
        environ: the variables; the process's own if None.
        needs_source: False if no source will be connected to: an unset variable of a DSN (or the
            catalog's address, or this node's token) then stays as it is written.

    A consumer with an unset variable is left out (`LoadedConfig.unset_consumers`): only what delivers needs it.

    Raises:
        ConfigError: the file can't be read or parsed, or something in it or in the environment is wrong;
            details: file, line, key of the first mistake, and `mistakes`, all of them.
    """
    environ = os.environ if environ is None else environ
    text = _read(file)
    try:
        written = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"at line (\d+)", str(error))
        line = int(place[1]) if place else text.count("\n") + 1
        twice = re.match(r"\s*([A-Za-z0-9_-]+)\s*=", text.split("\n")[line - 1])
        meant = _misplaced(text, line, twice[1]) if twice and "overwrite" in str(error) else None
        raise config_error(file, [Mistake(f"{file.name}:{line}", "", meant or f"not TOML: {error}", line)]) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets nested as deeply
        raise config_error(file, [Mistake(file.name, "", f"no TOML that can be read: {error}")]) from error
    return _Loader(file, text, written, environ, needs_source=needs_source).load()


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode().removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        mistake = Mistake(f"{file.name}:{line}", "", "not UTF-8 text", line)
        raise config_error(file, [mistake]) from error
    except OSError as error:
        raise config_error(file, [Mistake(str(file), "", f"can't be read: {error.strerror}")]) from error


class _Loader:
    def __init__(
        self,
        file: Path,
        text: str,
        written: dict[str, Any],
        environ: Mapping[str, str],
        *,
        needs_source: bool,
    ) -> None:
        self._file = file
        self._text = text
        self._written = written
        self._lines: Mapping[KeyPath, int] = key_lines(text)
        self._environ = environ
        self._needs_source = needs_source
        self._mistakes: dict[KeyPath, Mistake] = {}
        self._variables: dict[KeyPath, str] = {}
        self._unset: dict[KeyPath, Mistake] = {}
        self._named: set[str] = set()
        """Variables that the file's strings name."""

    def load(self) -> LoadedConfig:
        self._look_for_misplaced((), self._written)
        filled = self._fill((), self._written)
        self._check(_without(filled, self._unset), strict=True)
        merged = _merge(filled, self._overrides())
        unset = {path: mistake for path, mistake in self._unset.items() if path not in self._variables}
        config = self._check(_without(merged, unset), strict=False)
        if config is not None and not self._mistakes:
            for path, what in clashes(config, disk_bytes(self._file.parent)):
                self._note(path, what)
            for name, stream in config.streams.items():
                at: KeyPath = ("streams", name)
                of_lake = clashes_of_storage(at, stream.lake, self._file.parent)
                for path, code, what in (*of_lake, *clashes_of_rules(at, stream)):
                    self._note(path, what, code=code)
        if self._mistakes:
            raise config_error(self._file, list(self._mistakes.values()))
        assert config is not None
        origins = {path: f"{self._file.name}:{line}" for path, line in self._lines.items()}
        origins |= {path: f"env {name}" for path, name in self._variables.items()}
        return LoadedConfig(config, self._file, origins, unset)

    def _look_for_misplaced(self, path: KeyPath, table: dict[str, Any]) -> None:
        """Note keys below a commented header that their section lacks; a table of free names would accept them.

        A header names its whole path, so it belongs nowhere else. A key that is nearly one of its section's is a typo.
        """
        own = allowed_keys(path)
        for name, value in table.items():
            line = self._lines.get((*path, name))
            fits = line is None or name in own or self._is_header(line)
            or_free = not (takes_any_key(path) or nearest_key(name, own))
            meant = None if fits else _misplaced(self._text, line or 1, name, or_free=or_free)
            if meant is not None:
                self._note((*path, name), meant)
            elif isinstance(value, dict):
                self._look_for_misplaced((*path, name), value)

    def _is_header(self, line: int) -> bool:
        return self._text.split("\n")[line - 1].lstrip().startswith("[")

    def _fill(self, path: KeyPath, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._fill((*path, name), item) for name, item in value.items()}
        if isinstance(value, list):
            return [self._fill((*path, index), item) for index, item in enumerate(value)]
        if not isinstance(value, str):
            return value
        self._named |= variables_in(value)
        try:
            return (interpolate_dsn if is_database(path, value) else interpolate)(value, self._environ)
        except MissingVariable as error:
            is_of_source = is_database(path, value) or path == _NODE_TOKEN or _is_hash_key(path)
            may_wait = _is_of_consumer(path) or (is_of_source and not self._needs_source)
            if not may_wait or error.name is None:
                self._note(path, str(error), variable=error.name)
            else:
                self._unset[path] = Mistake(
                    f"{self._file.name}:{self._lines.get(path, 1)}", key_text(path), str(error), variable=error.name
                )
            return value

    def _overrides(self) -> dict[str, Any]:
        """Return the environment's values as nested dicts; notes which variable each value came from."""
        try:
            values, variables = environment_values(self._environ, self._named)
        except UnreadableVariable as error:
            what = 'must be JSON, such as ["…"] for a list or {"…": "…"} for a table'
            self._note((), what, place=f"env {error.name}")
            return {}
        self._variables |= variables
        return values

    def _check(self, data: dict[str, Any], *, strict: bool) -> Config | None:
        config, mistakes = validate(data, strict=strict)
        for path, what in mistakes:
            self._note(path, what)
        return config

    def _note(
        self,
        path: KeyPath,
        what: str,
        *,
        place: str | None = None,
        variable: str | None = None,
        code: str = "config",
    ) -> None:
        line = None
        if place is None:
            is_written = path in self._lines
            setting = next(
                (
                    n
                    for p, n in self._variables.items()
                    if p == path[: len(p)] or (p[: len(path)] == path and not is_written)
                ),
                None,
            )
            nearest = next((self._lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self._lines), None)
            line = None if setting else nearest
            place = f"env {setting}" if setting else f"{self._file.name}:{nearest or 1}"
        self._mistakes.setdefault(path, Mistake(place, key_text(path), what, line, variable, code))


def _is_hash_key(path: KeyPath) -> bool:
    """Return whether a key is the one that hashes of columns are made with."""
    return path[0] == "streams" and path[2:] == ("source", "hash_key")


def _is_of_consumer(path: KeyPath) -> bool:
    """Return whether a key is in `[streams.S.consumers.C]`."""
    return len(path) > _CONSUMER_KEYS and path[0] == "streams" and path[2] == "consumers"


def _without(data: dict[str, Any], unset: Iterable[KeyPath]) -> dict[str, Any]:
    """Return a configuration without the consumers that these keys belong to."""
    gone = {path[:_CONSUMER_KEYS] for path in unset if _is_of_consumer(path)}
    if not gone:
        return data
    kept = copy.deepcopy(data)
    for _, stream, _, name in gone:
        del kept["streams"][stream]["consumers"][name]
    return kept


def _misplaced(text: str, line: int, key: str, *, or_free: bool = False) -> str | None:
    """Return where a key below a commented header belongs; None if nowhere. A table of free names only if `or_free`."""
    meant = section_meant(
        text, line, key, lambda path, name: name in allowed_keys(path) or (or_free and takes_any_key(path))
    )
    return (
        meant
        and f"{key} belongs to {meant[0]}, whose header is still commented out (line {meant[1]}): uncomment it, too"
    )


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        merged[name] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
