"""A home: one folder with its configuration, its data and, by default, its lake.

Finding one, its configuration, its format, its catalog, and the folder of its sockets.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from millstream.errors import CatalogError, ConfigError, DiskFull, MillstreamError, UnknownStream, UsageError
from millstream.home.home_format import check_format, read_facts, write_facts
from millstream.home.paths import FILE_NAME, HomePaths
from millstream.model.addresses import IN_CATALOG
from millstream.model.ids import check_stream_name, parse_region_log_name
from millstream.private_files import make_folder

if TYPE_CHECKING:
    from millstream.catalog import Catalog, HomeIdentity
    from millstream.config.file import LoadedConfig
    from millstream.config.model import Config, StreamConfig

SOCKET_PATH_BYTES_MAX: Final = 100  # sun_path holds 104 bytes on macOS, 108 on Linux

_NO_LOG_HINT: Final = "The first append makes it, or `millstream run` where there is something to capture; `millstream status` shows what runs."
_NO_COPY_HINT: Final = "This node follows another one: `millstream run`, or `millstream follow`, has it from there; `millstream replicas` shows how far that is."
_NO_STREAM_HINT: Final = (
    "Add `[streams.NAME]` to it, for a stream that applications append to, and `[streams.NAME.source]` to capture a "
    "database; `millstream init --stream NAME DIR` writes such a file, with comments, into another folder."
)


@dataclass(frozen=True)
class Home(HomePaths):
    """A home at a path: its paths, its configuration and its catalog. Making one touches nothing."""

    needs_source: bool = True
    """Whether its configuration is read to connect to sources; if False, the variables of their DSNs need not be set."""
    environ: Mapping[str, str] | None = field(default=None, compare=False, repr=False)
    """The variables that its configuration names; the process's own if None."""

    # --- finding -----------------------------------------------------------------------------------------------

    @classmethod
    def find(
        cls,
        named: str | Path | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        start: Path | None = None,
        needs_source: bool = True,
        named_by: str = "--home",
    ) -> Home:
        """Return the named home, or that of MILLSTREAM_HOME, or the nearest folder upward with a configuration.

        Args:
            environ: the variables; the process's own if None.
            start: where the search upward begins; the working folder if None.
            needs_source: as the field.
            named_by: the name in errors of the place that named it.

        Raises:
            UsageError: `named` isn't a path.
            UsageError (`home_not_found`): none of these is one. A (copied) folder with logs in `data/wal/STREAM` and no
                configuration counts only if it is named, or if the search begins there.
        """
        environ = os.environ if environ is None else environ
        hint = None if named_by == "--home" else f"Name a home by {named_by} or MILLSTREAM_HOME."
        for origin, text in ((named_by, named), ("MILLSTREAM_HOME", environ.get("MILLSTREAM_HOME"))):
            said: object = text
            if not isinstance(said, str | os.PathLike | None):
                raise UsageError(
                    f"{origin} must be the path of a home, not {type(said).__name__}",
                    hint="Pass a text or a pathlib.Path.",
                )
            if text:
                path = Path(text).expanduser().absolute()
                if (path / FILE_NAME).exists() or (path / "data" / "wal").is_dir():
                    return cls(path, needs_source)
                what = "holds no millstream.toml" if path.is_dir() else "isn't there"
                if path.exists() and not path.is_dir():
                    what = "is a file, not a home"
                    hint = f"Name the folder that has a {FILE_NAME} in it" + (
                        f": {path.parent}." if path.name == FILE_NAME else "."
                    )
                if next(path.glob("[0-9][0-9][0-9][0-9][0-9]/*.wal"), None) is not None:
                    what = "is the log of one stream, not a home"
                    hint = f"Put it where a home has it: `mkdir -p DIR/data/wal && mv {path} DIR/data/wal/STREAM`, then name DIR."
                raise UsageError(f"{path} ({origin}) {what}", code="home_not_found", hint=hint, path=str(path))
        folder = (start or Path.cwd()).absolute()
        for candidate in (folder, *folder.parents):
            if (candidate / FILE_NAME).exists() or (candidate == folder and (folder / "data" / "wal").is_dir()):
                return cls(candidate, needs_source)
        raise UsageError(
            f"no {FILE_NAME} in {folder} or a folder above it", code="home_not_found", hint=hint, path=str(folder)
        )

    def lake_location(self, stream: StreamConfig) -> str:
        """Return a stream's lake as an absolute folder or a URL; `IN_CATALOG` if its catalog says where it lies."""
        if stream.lake.lies_in_catalog:
            return IN_CATALOG
        location = stream.lake.location
        return location if "://" in location else str(self.path / Path(location).expanduser())

    def pick_stream(self, named: str | None, *, of: list[str] | None = None) -> str:
        """Return the named stream, or the only one there is.

        Raises:
            UnknownStream: there is none of that name, none at all, or several and none was named.
            CorruptWal (`log_missing`): it had a log, which was moved or removed; unless `of` is given.
            ConfigError: there is none of that name, and the configuration can't be read to check.
        """
        name = self._pick_stream(named, of)
        if of is None:
            self._check_log(name)
        return name

    def _check_log(self, stream: str) -> None:
        from millstream.home.missing_logs import check_log

        check_log(self, stream)

    def _pick_stream(self, named: str | None, of: list[str] | None) -> str:
        names = self._streams_with_logs(named) if of is None else of
        said: object = named  # a public call, whose callers may have no types
        if named is not None and not isinstance(said, str):
            raise UnknownStream(
                f"{named!r} is no stream's name", hint=f"Streams here: {', '.join(names) or 'none yet'}."
            )
        if of is None and named is not None and "@" in named and named in self._logs_on_disk():
            parse_region_log_name(named)
            return named
        known = f"Streams here: {', '.join(names) or 'none yet'}."
        if named is not None:
            if named not in names:
                if of is None and named in self._configured_names():
                    self._check_log(named)
                    raise UnknownStream(
                        f"stream {named} has no log yet: nothing has run, or it is just starting",
                        hint=self._no_log_hint([named]),
                        stream=named,
                        known=names,
                    )
                raise UnknownStream(f"no stream {named}", hint=known, stream=named, known=names)
            return check_stream_name(named)
        if len(names) != 1:
            configured = self._configured_names() if of is None and not names else []
            if configured:
                for name in configured:
                    self._check_log(name)
                which = (
                    f"stream {configured[0]} has" if len(configured) == 1 else f"streams {', '.join(configured)} have"
                )
                what = f"{which} no log yet: nothing has run, or it is just starting"
                raise UnknownStream(what, hint=self._no_log_hint(configured), known=names)
            if not names and self._names_no_stream():
                raise UnknownStream(f"{self.config_file} names no stream", hint=_NO_STREAM_HINT, known=names)
            what = "several streams" if names else "no stream yet"
            hint = f"Name one with --stream. {known}" if names else "Streams appear when `millstream run` has started."
            raise UnknownStream(f"{self.path} has {what}", hint=hint, known=names)
        return names[0]

    def _streams_with_logs(self, named: str | None) -> list[str]:
        """Return the streams whose logs are here, and those whose logs are gone, if the only one left would be taken for another's."""
        found = self.streams_on_disk()
        if named is not None or len(found) != 1:
            return found
        from millstream.home.missing_logs import find_missing_log

        with contextlib.suppress(ConfigError):  # a log can be read without a configuration
            found += [name for name in self._configured_names() if name not in found and find_missing_log(self, name)]
        return sorted(found)

    def _no_log_hint(self, streams: list[str]) -> str:
        follows = all(self.role_file(stream).exists() for stream in streams)
        return _NO_COPY_HINT if follows else _NO_LOG_HINT

    def _names_no_stream(self) -> bool:
        """Return whether there is a configuration that can be read, and names no stream."""
        with contextlib.suppress(ConfigError, ImportError):
            return self.config_file.exists() and not self.config.streams
        return False

    def _configured_names(self) -> list[str]:
        """Return the names of the configured streams; none without a configuration, or without its reader.

        Raises:
            ConfigError: it is wrong.
        """
        if not self.config_file.exists():
            return []
        try:
            return sorted(self.config.streams)
        except ImportError:
            return []

    # --- its configuration

    @cached_property
    def loaded_config(self) -> LoadedConfig:
        """Return the configuration with the origins of its values, read once. Raises as `load_config`."""
        from millstream.config.file import load_config

        return load_config(self.config_file, self.environ, needs_source=self.needs_source)

    @property
    def config(self) -> Config:
        """Return the configuration, read once."""
        return self.loaded_config.config

    def check_names_stream(self) -> None:
        """Raise `ConfigError` if the configuration names no stream."""
        if not self.config.streams:
            raise ConfigError(f"{self.config_file} names no stream", hint=_NO_STREAM_HINT)

    def configured(self, stream: str) -> StreamConfig | None:
        """Return a stream's configuration; None if the home doesn't configure it, or has no configuration."""
        return self.config.streams.get(stream) if self.config_file.exists() else None

    def written_stream(self, named: str) -> StreamConfig:
        """Return a configured stream to write to; `UnknownStream`, with how to add it, if there is none."""
        said: object = named
        found = self.config.streams.get(named) if isinstance(said, str) else None
        if found is None:
            known = ", ".join(sorted(self.config.streams)) or "none"
            how = f"Add [streams.{named}] to it: a stream that only applications write needs nothing else."
            try:
                check_stream_name(named)
            except UsageError as error:
                how = error.hint
            raise UnknownStream(
                f"no stream {said if isinstance(said, str) and said.isprintable() else repr(said)} in {self.config_file}",
                hint=f"{how} Streams in this home: {known}.",
                stream=named,
            )
        return found

    def stream_config(self, named: str | None = None) -> tuple[str, StreamConfig]:
        """Return a configured stream, by name or the only one; `UnknownStream` as `pick_stream`."""
        name = self.pick_stream(named, of=sorted(self.config.streams))
        return name, self.config.streams[name]

    # --- its data

    def check_format(self) -> None:
        """Refuse a home that a newer Millstream wrote; raises `UsageError` (`home_too_new`), `CatalogError` as `home_format.check_format`."""
        check_format(self)

    def prepare(self) -> None:
        """Check the format and make the folders that writing needs.

        Raises:
            UsageError (`home_too_new`), CatalogError: as `check_format`.
            MillstreamError (`home_unwritable`): a folder can't be made or written.
            DiskFull: there is no space for it.
        """
        self.check_format()
        try:
            for folder in (self.data, self.run_folder, self.data / "wal"):
                make_folder(folder)
            write_facts(self, has_own_catalog=self.catalog_address() is None)
            probe = self.run_folder / f".probe-{os.getpid()}-{threading.get_ident()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise DiskFull(f"no space for {error.filename or self.path}", path=str(self.path)) from error
            raise MillstreamError(
                f"{error.filename or self.path}: {error.strerror}", code="home_unwritable", path=str(self.path)
            ) from error

    def catalog_address(self) -> str | None:
        """Return the catalog's configured address, as libpq takes it; None: embedded, or no configuration.

        Raises:
            ConfigError: the configuration is wrong, or the address names a variable that isn't set.
        """
        if not self.config_file.exists():
            return None
        try:
            return self.loaded_config.catalog_address()
        except ConfigError as error:
            # A mistake elsewhere in it doesn't hide an existing embedded catalog.
            elsewhere = not str(error.details.get("key", "")).startswith("catalog")
            if elsewhere and self.catalog_file.exists() and "catalog" not in read_facts(self):
                return None
            raise

    def has_catalog(self) -> bool:
        """Return whether there is a catalog to read: the embedded one appears with the first run.

        Raises:
            ConfigError: as `catalog_address`, if the catalog is known to be in PostgreSQL.
        """
        try:
            return self.catalog_address() is not None or self.catalog_file.exists()
        except ConfigError:
            if "catalog" in read_facts(self):
                raise
            return False

    def catalog_place(self) -> Path | str:
        """Return the catalog's present or future place: the file of the embedded one, or an address.

        Raises:
            ConfigError: as `catalog_address`.
            CatalogError: the home has another catalog than the configured one.
        """
        address = self.catalog_address()
        if address is None:
            if not self.catalog_file.exists() and "catalog" in read_facts(self):
                raise CatalogError(
                    f"this home's catalog lies in PostgreSQL, and {self.config_file} names none",
                    hint="Restore `url` in [catalog]: a new catalog would number the log's tables differently.",
                )
            return self.catalog_file
        if self.catalog_file.exists():
            raise CatalogError(
                f"{self.config_file} has the catalog in PostgreSQL, but this home's is still {self.catalog_file}",
                hint="Stop all processes and run `millstream catalog move`, or remove `url` from [catalog] in "
                f"{self.config_file} to continue without PostgreSQL.",
                file=str(self.catalog_file),
            )
        return address

    def open_catalog(self, *, busy_timeout_s: float | None = None) -> Catalog:
        """Open the catalog, wherever it is; it is made if there is none.

        Args:
            busy_timeout_s: how long its calls wait for locks and for a server that has gone away; None:
                the default.

        Raises:
            ConfigError, CatalogError: as `catalog_place`; or it can't be opened (`CatalogError` or a
                subclass).
        """
        from millstream.catalog import Catalog
        from millstream.catalog.database import BUSY_TIMEOUT_S

        place, patience_s = self.catalog_place(), BUSY_TIMEOUT_S if busy_timeout_s is None else busy_timeout_s
        home = None if isinstance(place, Path) else self.identity()
        return Catalog(place, home=home, busy_timeout_s=patience_s)

    def identity(self) -> HomeIdentity:
        """Return this home's identity in a shared catalog. `prepare` makes its id, which moves with its folder."""
        from millstream.catalog import HomeIdentity

        place = f"{socket.gethostname()}:{self.path.resolve()}"
        return HomeIdentity(str(read_facts(self).get("id", "")), place)

    # --- sockets -----------------------------------------------------------------------------------------------

    def make_socket_folder(self) -> Path:
        """Return a folder for this home's sockets that is short enough for AF_UNIX, linked from `data/run/sockets`.

        Raises:
            MillstreamError (`home_unwritable`): there is no folder for it, another user's is in its place, or the link
                can't be made.
        """
        digest = hashlib.sha256(os.fsencode(self.path.resolve())).hexdigest()[:12]
        problems = []
        for base in _socket_bases():
            folder = base / f"millstream-{os.getuid()}-{digest}"
            if len(os.fsencode(folder)) > SOCKET_PATH_BYTES_MAX - 16:
                problems.append(f"{folder}: too long for a socket")
                continue
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
                facts = folder.lstat()
                if facts.st_uid != os.getuid() or facts.st_mode & 0o077 or folder.is_symlink():
                    problems.append(f"{folder}: belongs to another user, or is open to others")
                    continue
            except OSError as error:
                problems.append(f"{folder}: {error.strerror}")
                continue
            self._link_sockets(folder)
            return folder
        raise MillstreamError(
            "; ".join(problems), code="home_unwritable", hint="Set TMPDIR to a short folder of this user's own."
        )

    def socket_folder(self) -> Path | None:
        """Return the folder of the home's sockets, from the link; None if it has never been run."""
        with contextlib.suppress(OSError):
            return (self.run_folder / "sockets").readlink()
        return None

    def _link_sockets(self, folder: Path) -> None:
        if self.socket_folder() == folder:
            return
        link = self.run_folder / "sockets"
        # Threads of one process may open the home at once: each renames a link of its own.
        fresh = self.run_folder / f".sockets-{uuid4().hex}"
        try:
            fresh.symlink_to(folder)
            try:
                fresh.rename(link)
            except IsADirectoryError:
                # A copy of a home that followed links has a folder here. Nothing listens in it: sockets are bound in the
                # link's target alone. Another thread may remove it too, and put its link there, which stays.
                shutil.rmtree(link, ignore_errors=True)
                fresh.rename(link)
        except OSError as error:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise MillstreamError(f"{link}: {error.strerror}", code="home_unwritable", path=str(link)) from error


def _socket_bases() -> list[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return [Path(base) for base in (runtime, tempfile.gettempdir(), "/tmp") if base and Path(base).is_dir()]  # noqa: S108 - the folder in it is private and checked
