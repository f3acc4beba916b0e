"""Addresses of servers, stores and folders: split into their parts, and shown without their secrets.

Every text shown to people (messages, log lines, `config show`) shows an address through
`mask_address`, which shows only the parts that it understands; of an address that libpq has parsed,
`millstream.libpq.describe_parameters` shows the server and the database. An address that doesn't parse is
masked whole: a typo (`postgres!//app:PASSWORD@host`, a raw `@` in a password) moves the password to
where a looser parser takes it for a host, a port or a database.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

MASK: Final = "***"
"""The replacement for a hidden part."""
IN_CATALOG: Final = "catalog://lake"
"""The location of a lake whose tables lie where its Iceberg catalog says."""

_HOST: Final = r"(?:\[[0-9A-Fa-f:.]+(?:%25?\w+)?\]|[\w.~%-]*)(?::(?:\d{1,5})?)?"
_URL: Final = re.compile(
    rf"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?:(?P<user>[^\s:/?#@]*)(?P<password>:[^\s/?#@]*)?@)?"
    rf"(?P<hosts>{_HOST}(?:,{_HOST})*)(?P<path>/[^?#@]*)?(?P<query>\?[^\s#]*)?\Z"
)
_PAIR: Final = re.compile(r"(?P<key>[A-Za-z_]+)=(?P<value>[^&=]*)\Z")
_KEYWORD: Final = re.compile(
    r"\s*(?P<key>[A-Za-z_]+)(?P<equals>\s*=\s*)(?P<value>'(?:\\.|[^'\\])*'|(?!')(?:\\.|[^\s\\])*)(?=\s|\Z)", re.DOTALL
)
_BROKERS: Final = re.compile(rf"(?:[A-Za-z_]+://)?{_HOST}(?:\s*,\s*(?:[A-Za-z_]+://)?{_HOST})*\Z")
_ORIGIN: Final = re.compile(r"https?://[^/?#@\s]+(?=[/?#]|\Z)", re.IGNORECASE)
_VARIABLE: Final = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}\Z")
_FOLDER: Final = re.compile(r"(?![/.~])[^@:=?]*\Z|[/.~](?!.*:[^@]*@)[^?]*\Z", re.DOTALL)

_PLAIN: Final = frozenset({
    "application_name", "channel_binding", "client_encoding", "connect_timeout", "db", "dbname", "decode_responses",
    "fallback_application_name", "gssdelegation", "gssencmode", "gsslib", "host", "hostaddr", "keepalives", "keepalives_count", "keepalives_idle",
    "keepalives_interval", "krbsrvname", "load_balance_hosts", "max_protocol_version", "min_protocol_version", "passfile", "port",
    "protocol", "replication", "require_auth", "requirepeer", "service", "socket_timeout", "ssl_ca_certs", "ssl_cert_reqs", "ssl_certfile",
    "ssl_check_hostname", "ssl_keyfile", "ssl_max_protocol_version", "ssl_min_protocol_version", "sslcert", "sslcertmode", "sslcompression",
    "sslcrl", "sslcrldir", "sslkey", "sslkeylogfile", "sslmode", "sslnegotiation", "sslrootcert", "sslsni", "target_session_attrs", "tcp_user_timeout",
    "user", "username",
})  # fmt: skip
"""Keywords of libpq and of Redis clients whose values are shown."""
_HIDDEN: Final = frozenset({
    "password", "sslpassword", "options", "oauth_client_id", "oauth_client_secret", "oauth_issuer", "oauth_scope", "scram_client_key",
    "scram_server_key",
})  # fmt: skip
"""Keywords of libpq whose values are hidden."""
_LONE_USER: Final = frozenset({"postgres", "postgresql", "abfs", "abfss", "wasb", "wasbs"})
"""Schemes in which a lone part before the `@` is a user name. In other schemes it may be an access key or a token."""
_PATHS: Final = {"postgres": r"/[^/:\s]*", "postgresql": r"/[^/:\s]*", "redis": r"/\d*", "rediss": r"/\d*"}

_SECRET_KEY: Final = re.compile(
    r"pass(word|wd|phrase)?$|secret|token|credential|(access|account|private|hash)[_.]?key|key[_.]pem|[_.]sas(?!l)|jaas|user[_.]info"
    r"|oauthbearer[_.]config|connection[_.]?string",
    re.IGNORECASE,
)
_CREDENTIALS: Final = re.compile(r"\b(authorization|cookie|bearer|basic)\b\s*[: ]", re.IGNORECASE)
_SECRET_WITHIN: Final = re.compile(
    r"(pass(word|wd|phrase)?|secret|token|credentials?|key|signature|sig)[\"']?\s*[=:]", re.IGNORECASE
)


class UrlParts(NamedTuple):
    """A URL's parts as they are written, percent-encoding included."""

    scheme: str
    user: str | None
    """The part before the `:` or `@`; None without an `@`."""
    password: str | None
    """The part behind the `:`; None without a `:` before the `@`."""
    hosts: str
    path: str
    query: str
    """The query with its `?`; empty if there is none."""

    def text(self) -> str:
        """Return the URL of these parts."""
        password = "" if self.password is None else f":{self.password}"
        login = "" if self.user is None else f"{self.user}{password}@"
        return f"{self.scheme}://{login}{self.hosts}{self.path}{self.query}"


class Keyword(NamedTuple):
    """One `key = value` of a keyword address, and the place of its value."""

    key: str
    value: str
    """The value without quotes and escapes."""
    start: int
    end: int


def split_url(text: str) -> UrlParts | None:
    """Split a URL; None if it is none or ambiguous (`@` or `/` in a password, a port that isn't a number)."""
    match = _URL.match(text)
    if match is None:
        return None
    password = None if match["password"] is None else match["password"][1:]
    return UrlParts(match["scheme"], match["user"], password, match["hosts"], match["path"] or "", match["query"] or "")


def split_keywords(text: str) -> list[Keyword] | None:
    """Return the pairs of an address in libpq's keyword form; None if it isn't in that form."""
    pairs: list[Keyword] = []
    at, end = 0, len(text.rstrip())
    while at < end:
        match = _KEYWORD.match(text, at)
        if match is None:
            return None
        raw = match["value"]
        value = re.sub(r"\\(.)", r"\1", raw[1:-1] if raw.startswith("'") else raw, flags=re.DOTALL)
        pairs.append(Keyword(match["key"], value, match.start("value"), match.end("value")))
        at = match.end()
    return pairs or None


def query_pairs(query: str) -> list[tuple[str, str]] | None:
    """Return the pairs of a URL's query (with or without its `?`), as written; None if it isn't made of pairs."""
    pairs = []
    for part in filter(None, query.removeprefix("?").split("&")):
        match = _PAIR.match(part)
        if match is None:
            return None
        pairs.append((match["key"], match["value"]))
    return pairs


def is_brokers(text: str) -> bool:
    """Whether a text is a list of brokers: `host:9092,host:9092`."""
    return _BROKERS.match(text) is not None


def is_secret_key(key: str) -> bool:
    """Whether a key names a secret value, in a configuration or among other programs' options."""
    return key.lower() in _HIDDEN or _SECRET_KEY.search(key) is not None


def mask_address(text: str) -> str:
    """Return an address as it may be shown: a URL, keywords of libpq, brokers, a folder, or one variable.

    Passwords and unknown options become `***`. A text that is none of these becomes `***` as a
    whole.
    """
    if _VARIABLE.match(text) or is_brokers(text):
        return text
    if "://" in text:
        return _masked_url(text)
    keywords = split_keywords(text)
    if keywords is not None:
        return _masked_keywords(text, keywords)
    is_folder = _FOLDER.match(text) and "//" not in text and not _SECRET_WITHIN.search(text)
    return text if is_folder else MASK


def mask_path(url: str) -> str:
    """Return a URL whose path or query may be secret as it may be shown: scheme, host and port."""
    found = _ORIGIN.match(url)
    return f"{found[0]}/{MASK}" if found is not None else url if _VARIABLE.match(url) else MASK


def mask_option(key: str, value: str) -> str:
    """Return an option's value as it may be shown, for options passed to Spark, object stores and Kafka clients."""
    if is_secret_key(key) or _SECRET_WITHIN.search(value):
        return MASK
    if "://" in value:
        return mask_address(value)
    return MASK if "@" in value else value


def mask_words(argv: Sequence[str]) -> list[str]:
    """Return the words of a command as they may be shown: `--password=a`, `--token a`, credentials of HTTP and addresses masked."""
    shown, option = [], ""
    for word in argv:
        name, is_pair, value = word.partition("=")
        if _CREDENTIALS.search(word):
            shown.append(MASK)
        elif not word.startswith("-"):
            shown.append(mask_option(option, word))
        else:
            shown.append(f"{name}={mask_option(name.lstrip('-'), value)}" if is_pair else word)
        option = word.lstrip("-") if word.startswith("-") and not is_pair else ""
    return shown


def _masked_url(text: str) -> str:
    parts = split_url(text)
    if parts is None or not re.fullmatch(_PATHS.get(parts.scheme.lower(), "[^@]*"), parts.path or "/"):
        return MASK
    if _SECRET_WITHIN.search(parts.path):  # the `?` before the options is missing
        return MASK
    pairs = query_pairs(parts.query)
    if pairs is None:
        return MASK
    query = list(_masked_pairs(pairs))
    if MASK in query:
        return MASK
    if parts.password is not None:
        parts = parts._replace(password=MASK)
    elif parts.user and parts.scheme.lower() not in _LONE_USER:
        parts = parts._replace(user=MASK)
    return parts._replace(query=f"?{'&'.join(query)}" if query else parts.query).text()


def _masked_pairs(pairs: list[tuple[str, str]]) -> Iterator[str]:
    for key, value in pairs:
        if is_secret_key(key):
            yield f"{key}={MASK}"
        elif key.lower() in _PLAIN:
            yield f"{key}={MASK if '@' in value else value}"
        else:
            yield MASK


def _masked_keywords(text: str, pairs: list[Keyword]) -> str:
    shown, at = "", 0
    for pair in pairs:
        key = pair.key.lower()
        shown += text[at : pair.start]
        at = pair.end
        if is_secret_key(key):
            shown += MASK
        elif key in _PLAIN and not re.search(r"[@=]|//", pair.value):
            shown += text[pair.start : pair.end]
        else:
            return MASK
    return shown + text[at:]
