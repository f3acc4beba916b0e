"""Loading `millstream.toml`: text, variables, environment, checks, and the place of every value and every error.

There are three layers, the later wins: defaults, the file, and the environment's variables (`environment`). Every
mistake is a `ConfigError` that names file, line, key and the allowed values; all mistakes of a file are reported at
once.
"""

from __future__ import annotations

import copy
import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_args, get_origin

from pydantic import BaseModel, ValidationError

from millstream.config.alerts_model import clashes_of_alerts
from millstream.config.commented_sections import section_meant
from millstream.config.environment import UnreadableVariable, environment_values
from millstream.config.interpolation import (
    MissingVariable,
    interpolate,
    interpolate_dsn,
    is_database,
    mask,
    variables_in,
)
from millstream.config.model import (
    EMBEDDED_CATALOG,
    Config,
    SourceConfig,
    StreamConfig,
)
from millstream.config.quantities import disk_bytes
from millstream.config.rule_checks import clashes_of_rules
from millstream.config.serving_model import HttpConfig
from millstream.config.stream_checks import (
    clashes_of_addresses,
    clashes_of_consumers,
    clashes_of_format,
    clashes_of_level,
    clashes_of_regions,
    clashes_of_routing,
    clashes_of_storage,
    in_words,
    refusals,
)
from millstream.config.toml_lines import KeyPath, key_lines
from millstream.errors import ConfigError, MillstreamError, UsageError
from millstream.libpq import is_address
from millstream.model.addresses import MASK, mask_address
from millstream.model.ids import check_stream_name, default_name

FILE_NAME: Final = "millstream.toml"
_NAME_BYTES_MAX: Final = 63
"""Bytes of a name in PostgreSQL."""
_NODE_TOKEN: Final = ("replication", "token")
_CONSUMER_KEYS: Final = 4
"""Length of a consumer's path: `streams.S.consumers.C`."""
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+\Z")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration, and the origin of each of its values."""

    config: Config
    file: Path
    origins: Mapping[KeyPath, str] = field(default_factory=dict)
    unset: Mapping[KeyPath, _Mistake] = field(default_factory=dict)
    """Addresses of databases, and this node's token, that name an unset variable, and are kept as written; also settings
    of consumers, which `config` lacks then."""

    def catalog_address(self) -> str | None:
        """Return the address of the catalog's database; None if it is embedded.

        `ConfigError` if its variable isn't set.
        """
        url, path = self.config.catalog.url, ("catalog", "url")
        if path in self.unset:
            raise _config_error(self.file, [self.unset[path]])
        if url != EMBEDDED_CATALOG and not is_address(url):
            raise _config_error(self.file, [_Mistake(self.origin(path), key_text(path), "is no PostgreSQL address")])
        return None if url == EMBEDDED_CATALOG else url

    def node_token(self) -> str | None:
        """Return the token that this node presents to others; None if there is none.

        `ConfigError` if its variable isn't set.
        """
        if _NODE_TOKEN in self.unset:
            raise _config_error(self.file, [self.unset[_NODE_TOKEN]])
        return self.config.replication.token

    def unset_consumers(self, stream: str) -> dict[str, ConfigError]:
        """Return the consumers that `config` lacks because a variable of theirs isn't set, with the error, by name."""
        mistakes: dict[str, list[_Mistake]] = {}
        for path, mistake in self.unset.items():
            if _is_of_consumer(path) and path[1] == stream:
                mistakes.setdefault(str(path[3]), []).append(mistake)
        return {name: _config_error(self.file, some) for name, some in mistakes.items()}

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
        return _config_error(self.file, [_Mistake(place, key_text(path), what, int(line) if line.isdigit() else None)])

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
        raise _config_error(file, [_Mistake(f"{file.name}:{line}", "", meant or f"not TOML: {error}", line)]) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets nested as deeply
        raise _config_error(file, [_Mistake(file.name, "", f"no TOML that can be read: {error}")]) from error
    return _Loader(file, text, written, environ, needs_source=needs_source).load()


@dataclass(frozen=True, slots=True)
class _Mistake:
    place: str
    key: str
    what: str
    line: int | None = None
    variable: str | None = None
    """The environment variable that would fix it."""
    code: str = "config"

    def __str__(self) -> str:
        return f"{self.place}: {self.key}: {self.what}" if self.key else f"{self.place}: {self.what}"


def _config_error(file: Path, mistakes: list[_Mistake]) -> ConfigError:
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


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode().removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        mistake = _Mistake(f"{file.name}:{line}", "", "not UTF-8 text", line)
        raise _config_error(file, [mistake]) from error
    except OSError as error:
        raise _config_error(file, [_Mistake(str(file), "", f"can't be read: {error.strerror}")]) from error


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
        self._mistakes: dict[KeyPath, _Mistake] = {}
        self._variables: dict[KeyPath, str] = {}
        self._unset: dict[KeyPath, _Mistake] = {}
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
            for path, what in _clashes(config, disk_bytes(self._file.parent)):
                self._note(path, what)
            for name, stream in config.streams.items():
                at: KeyPath = ("streams", name)
                for path, code, what in (*clashes_of_storage(at, stream.lake), *clashes_of_rules(at, stream)):
                    self._note(path, what, code=code)
        if self._mistakes:
            raise _config_error(self._file, list(self._mistakes.values()))
        assert config is not None
        origins = {path: f"{self._file.name}:{line}" for path, line in self._lines.items()}
        origins |= {path: f"env {name}" for path, name in self._variables.items()}
        return LoadedConfig(config, self._file, origins, unset)

    def _look_for_misplaced(self, path: KeyPath, table: dict[str, Any]) -> None:
        """Note keys below a commented header that their section lacks; a table of free names would accept them.

        A header names its whole path, so it belongs nowhere else. A key that is nearly one of its section's is a typo.
        """
        own = _allowed(path)
        for name, value in table.items():
            line = self._lines.get((*path, name))
            fits = line is None or name in own or self._is_header(line)
            or_free = not (_takes_any(path) or _nearest(name, own))
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
                self._unset[path] = _Mistake(
                    f"{self._file.name}:{self._lines.get(path, 1)}", key_text(path), str(error), variable=error.name
                )
            return value

    def _overrides(self) -> dict[str, Any]:
        """Return the environment's values as nested dicts; notes which variable each value came from."""
        try:
            values, variables = environment_values(self._environ, self._named)
        except UnreadableVariable as error:
            self._note((error.name,), f"the variable holds no value of its kind: {error}", place="env")
            return {}
        self._variables |= variables
        return values

    def _check(self, data: dict[str, Any], *, strict: bool) -> Config | None:
        """Validate: the file alone strictly, all layers with text converted, as variables hold only text."""
        try:
            return Config.model_validate(data, strict=strict)
        except ValidationError as error:
            for mistake in error.errors():
                path = tuple(part for part in mistake["loc"] if part != "[key]")
                if not (strict and mistake["type"] == "missing"):
                    self._note(path, _say(path, dict(mistake)))
            return None

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
        self._mistakes.setdefault(path, _Mistake(place, key_text(path), what, line, variable, code))


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


def key_text(path: KeyPath) -> str:
    """Return a key's path as TOML writes it: `streams.shop.shards."public.big"`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if _BARE_KEY.match(part) else f'"{part}"')
    return text


def _misplaced(text: str, line: int, key: str, *, or_free: bool = False) -> str | None:
    """Return where a key below a commented header belongs; None if nowhere. A table of free names only if `or_free`."""
    meant = section_meant(text, line, key, lambda path, name: name in _allowed(path) or (or_free and _takes_any(path)))
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


def _say(path: KeyPath, mistake: dict[str, Any]) -> str:
    """Return a pydantic mistake in our words; never the value, which may be a secret, unless it is one of a few."""
    kind, context = mistake["type"], mistake.get("ctx", {})
    if kind == "extra_forbidden":
        if path[0] == "streams" and path[2:3] == ("tables",) and path[4:] == ("merge",):
            return f"unknown key; merge rules of a table belong in [{key_text((*path[:2], 'merge', path[3]))}]"
        allowed = _allowed(path[:-1])
        near = _nearest(str(path[-1]), allowed)
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


def _nearest(key: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed key that a mistyped one probably means; None if there is none."""
    return next(iter(difflib.get_close_matches(key, list(allowed), n=1)), None)


def _allowed(path: KeyPath) -> list[str]:
    """Return the keys of the table at a path; none if it is no table, or takes any."""
    model = _type_at(path)
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _takes_any(path: KeyPath) -> bool:
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


def _clashes(config: Config, disk: int) -> Iterator[tuple[KeyPath, str]]:
    """Yield conflicts between valid settings, and mistakes that only other rooms can detect."""
    yield from _clashes_of_http(config.http)
    yield from clashes_of_alerts(config.alerts)
    slots: dict[tuple[str, str], str] = {}
    for name, stream in config.streams.items():
        at: KeyPath = ("streams", name)
        yield from refusals(at, check_stream_name, name)
        yield from _clashes_of_source(at, name, stream.source, slots)
        log = stream.log
        if log.retention_bytes_max_of(disk) < log.retention_bytes_of(disk):
            yield (
                (*at, "log", "retention_bytes_max"),
                f"{log.retention_bytes_max} is below retention_bytes, {log.retention_bytes}, on this disk of {disk} bytes",
            )
        if log.frame_version == 1 and (stream.region or log.shards > 1 or config.writer.name is not None):
            yield (
                (*at, "log", "frame_version"),
                "must be 2 for a stream with a region, several shards or several writers",
            )
        yield from _clashes_of_names(at, name, stream)
        yield from clashes_of_addresses(at, stream)
        yield from _clashes_of_buffer(at, name, stream, config.writer.name)
        yield from clashes_of_format(at, stream.lake, is_local=config.spark.is_local)
        yield from clashes_of_level(at, stream.acks, config.replication)
        yield from clashes_of_routing(at, name, stream)
        yield from clashes_of_consumers(at, stream.consumers)
        yield from clashes_of_regions(at, stream, config.writer.name)


def _clashes_of_names(at: KeyPath, name: str, stream: StreamConfig) -> Iterator[tuple[KeyPath, str]]:
    from millstream.model.names import parse_column, parse_qualified_name
    from millstream.model.pgtypes import parse_lake_override

    for table, shard in stream.shards.items():
        yield from refusals((*at, "shards", table), parse_qualified_name, table)
        if not 0 <= shard < stream.log.shards:
            yield (
                (*at, "shards", table),
                f"the stream has shards 0 to {stream.log.shards - 1} ([streams.{name}.log] shards)",
            )
    for column, kind in stream.types.items():
        yield from refusals((*at, "types", column), parse_lake_override, kind)
        try:
            parse_column(column)
        except UsageError:
            yield (*at, "types", column), "must name a column as schema.table.column"
    for table, key in stream.keys.items():
        yield from refusals((*at, "keys", table), parse_qualified_name, table)
        if not key or len(set(key)) < len(key):
            yield (*at, "keys", table), "must name one column or more, each once"


def _clashes_of_buffer(
    at: KeyPath, name: str, stream: StreamConfig, writer: str | None
) -> Iterator[tuple[KeyPath, str]]:
    """Yield those of the write buffer: a stream has its rows from one place."""
    buffer = stream.buffer
    if buffer is None:
        return
    if stream.source is not None:
        yield (
            (*at, "buffer", "role"),
            f"stream {name} captures a database, whose order its log keeps: it can't {'write to' if buffer.role == 'writes' else 'read from'} a buffer besides",
        )
    if stream.routing is not None and stream.routing.sinks:
        yield (
            (*at, "buffer", "role"),
            f"stream {name} has sinks beside its log, and a stream has its rows in one place or takes them from one: give it sinks, or a buffer",
        )
    if buffer.role == "reads" and writer is not None:
        yield (
            (*at, "buffer", "role"),
            "a stream that reads from a buffer has one writer: with several, two would take the same operations",
        )


def _clashes_of_http(http: HttpConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yield those of the protection of `[http]`."""
    for one, other in (
        ("tls_certificate", "tls_key"),
        ("tls_key", "tls_certificate"),
        ("client_ca", "tls_certificate"),
    ):
        if getattr(http, one) is not None and getattr(http, other) is None:
            yield ("http", one), f"is nothing without {other}"
    if http.clients and http.client_ca is None:
        yield ("http", "clients"), "nobody shows a certificate without client_ca"


def _clashes_of_source(
    at: KeyPath, name: str, source: SourceConfig | None, slots: dict[tuple[str, str], str]
) -> Iterator[tuple[KeyPath, str]]:
    """Yield those of a stream's source; `slots` are those of the streams before it."""
    from millstream.model.names import TablePatterns

    if source is None:
        return
    slot = source.slot or default_name(name)
    shown = mask_address(source.dsn)  # another password makes no other server
    other = slots.setdefault((source.dsn if shown == MASK else shown, slot), name)
    if other != name:
        yield (*at, "source", "slot"), f"stream {other} uses the slot {slot} of the same server: each needs its own"
    # PostgreSQL cuts a longer name without an error: both publications would be one.
    for key, named, of in (
        ("publication", source.publication or default_name(name), "_inserts"),
        ("slot", slot, ""),
    ):
        most = _NAME_BYTES_MAX - len(of)
        if len(named.encode()) > most:
            yield (
                (*at, "source", key),
                f"{named} is longer than the {most} bytes that PostgreSQL leaves it: set a shorter one",
            )
    try:
        TablePatterns.parse(source.tables)
    except MillstreamError as error:
        yield (*at, "source", "tables"), in_words(error)
