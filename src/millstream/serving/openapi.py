"""The OpenAPI document: FastAPI's own paths, and those served outside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from millstream.client.call_results import SERVER_DEADLINE_S_MAX
from millstream.serving.problem_documents import MEDIA_TYPE
from millstream.serving.queries.frames import POSITION_HEADER
from millstream.serving.row_writes import ARROW_TYPE, JSON_TYPE

PROBLEM: Final[Mapping[str, Any]] = {
    "title": "Problem",
    "description": "RFC 9457. `code` is stable, `hint` says what to do, `retry` whether the same request may succeed later.",
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string", "examples": ["urn:millstream:error:invalid_value"]},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string"},
        "hint": {"type": "string"},
        "retry": {"enum": ["never", "backoff", "reopen", "operator"]},
        "details": {"type": "object"},
    },
}
_APPENDED: Final[Mapping[str, Any]] = {
    "title": "Appended",
    "description": "The appended rows: they are durable.",
    "type": "object",
    "required": ["token", "first", "rows", "offsets", "duplicate", "rejected"],
    "properties": {
        "token": {"type": "string", "description": "Position of these rows: a reader that has read up to it has them."},
        "first": {"type": "integer", "description": "The first row's number in the stream; the others follow it."},
        "rows": {"type": "integer", "description": "Number of appended rows."},
        "offsets": {
            "type": "object",
            "description": "By shard, the half-open range of offsets.",
            "additionalProperties": {
                "type": "array",
                "items": {"type": "integer"},
                "minItems": 2,
                "maxItems": 2,
            },
        },
        "duplicate": {
            "type": "boolean",
            "description": "Whether it was durable already, of an earlier request with the same key or number; this is what that one got.",
        },
        "buffer": {"description": "Where it lies in the stream's write buffer, where it has one; null else."},
        "rejected": {
            "type": "array",
            "description": "Rows that weren't appended (`on_clash=rows`).",
            "items": {
                "type": "object",
                "required": ["row", "code", "reason"],
                "properties": {
                    "row": {"type": "integer", "description": "Its place in the request, from 0."},
                    "code": {"type": "string"},
                    "reason": {"type": "string"},
                    "column": {"type": ["string", "null"]},
                },
            },
        },
    },
}
_REJECTED: Final[Mapping[str, Any]] = _APPENDED["properties"]["rejected"]
_APPENDED_TABLES: Final[Mapping[str, Any]] = {
    "title": "AppendedTables",
    "description": "The result of an append to several tables: all of it is durable.",
    "type": "object",
    "required": ["token", "duplicate", "tables"],
    "properties": {
        "token": {
            "type": "string",
            "description": "A reader that has read up to it has seen these rows; the newest token if there are none.",
        },
        "duplicate": _APPENDED["properties"]["duplicate"],
        "tables": {
            "type": "object",
            "description": "Each table's part, by its full name.",
            "additionalProperties": {
                "type": "object",
                "required": ["first", "rows", "rejected"],
                "properties": {
                    "first": {
                        "type": ["integer", "null"],
                        "description": "The first row's number in the stream; null if no row was kept.",
                    },
                    "rows": {"type": "integer", "description": "Number of rows that were appended."},
                    "rejected": _REJECTED,
                },
            },
        },
    },
}
_INFLUX_ERROR: Final[Mapping[str, Any]] = {
    "title": "LineError",
    "description": "As InfluxDB's clients look for it: `error` at `/write`, `code` and `message` at `/api/v2/write`.",
    "type": "object",
    "properties": {
        "error": {"type": "string"},
        "code": {"type": "string"},
        "message": {"type": "string"},
        "line": {"type": "integer"},
    },
}
_ROW: Final = {"type": "object", "minProperties": 1, "examples": [{"page": "/", "ms": 12.5}]}
_REFUSED: Final[Mapping[int, str]] = {
    400: "The request can't be read.",
    401: "The request has no valid access token.",
    403: "The token has no right to do this, or the request comes from a page of another server.",
    404: "There is no such stream or table.",
    405: "The path takes other methods.",
    408: "The request didn't arrive in time.",
    409: "The table is captured, has another key, or is quarantined; the write's session number or key was used for other rows, or is no longer known; or the requested data isn't there yet.",
    410: "The requested records were dropped by retention.",
    413: "The body is too large.",
    415: "The body is of a type or encoding that isn't taken.",
    421: "The request was sent to a name that isn't the server's.",
    422: "The rows don't fit the table or have no route, or are too many or too large; or a query takes more than it may.",
    424: "Some sinks took the rows and others didn't: if they are sent again, the former have them twice.",
    429: "There is no room now: send it again after `Retry-After` seconds.",
    500: "A failure of the server's; with `append_outcome_unknown` the rows may be durable.",
    503: "No writer runs now, another node leads (`read_only`, `fenced`), or others don't have the rows in time (`not_enough_replicas`): send it again after `Retry-After` seconds.",
    507: "The disk is full.",
}
_RETRIED: Final = frozenset({429, 503})
_ENCODING: Final = {
    "name": "Content-Encoding",
    "in": "header",
    "schema": {"enum": ["identity", "gzip"]},
    "description": "How the body is compressed.",
}
KEY: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
    "description": "A key of the caller's making: sent again with it, the write is answered as the first time, and appended once.",
}
_ACKS: Final = {
    "name": "Millstream-Acks",
    "in": "header",
    "schema": {"type": "string", "pattern": r"^(local|object|durable\(0*[1-9][0-9]{0,2}\))$"},
    "description": "Where the rows have to be before it answers: `local`, `durable(1)` for one follower, `durable(2)` …, `object` for the object store; "
    "the stream's own level is the least. Where they aren't within `deadline_s`, it answers 503, and the rows are durable here: send them again under the same key.",
}
_DEADLINE: Final = {
    "name": "deadline_s",
    "in": "query",
    "schema": {"type": "number", "minimum": 0, "maximum": SERVER_DEADLINE_S_MAX},
    "description": "How long to wait for room in the log's queue, and then for other machines where those have to have the rows, in seconds.",
}


_STREAM: Final = {"name": "stream", "in": "path", "required": True, "schema": {"type": "string"}}
_OPTIONS: Final = (
    {
        "name": "on_clash",
        "in": "query",
        "schema": {"enum": ["request", "rows"], "default": "request"},
        "description": "Refused if a row doesn't fit its table: the whole request, or such rows alone.",
    },
    _DEADLINE,
    _ENCODING,
    _ACKS,
    KEY,
    {
        "name": "Millstream-Session",
        "in": "header",
        "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
        "description": "A session, in which the caller numbers its writes: instead of a key.",
    },
    {
        "name": "Millstream-Session-Number",
        "in": "header",
        "schema": {"type": "integer", "minimum": 1},
        "description": "The write's number in its session, from 1.",
    },
)


def refusals(media_type: str = MEDIA_TYPE, schema: str = "Problem") -> dict[str, Any]:
    """Return the error answers of a path."""
    return {
        str(status): {
            "description": text,
            "content": {media_type: {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
            **({"headers": {"Retry-After": {"schema": {"type": "string"}}}} if status in _RETRIED else {}),
        }
        for status, text in _REFUSED.items()
    }


def _rows_path() -> dict[str, Any]:
    bodies = {
        "application/x-ndjson": {"schema": {"type": "string", "examples": ['{"page": "/", "ms": 12.5}\n']}},
        JSON_TYPE: {"schema": {"anyOf": [_ROW, {"type": "array", "minItems": 1, "items": _ROW}]}},
        ARROW_TYPE: {"schema": {"type": "string", "format": "binary"}},
    }
    return {
        "post": {
            "operationId": "append_rows",
            "tags": ["write"],
            "summary": "Append rows to a table; they are durable when it answers.",
            "description": "One request is one operation: readers see its rows together or not at all. JSON objects, a line each or in an array, or an "
            "Arrow IPC stream.",
            "parameters": [
                _STREAM,
                {
                    "name": "table",
                    "in": "path",
                    "required": True,
                    "schema": {"type": "string"},
                    "description": "`schema.table`, quoted where it must be; without a schema it is of `public`.",
                },
                *_OPTIONS,
            ],
            "requestBody": {"required": True, "content": bodies},
            "responses": {
                "200": {
                    "description": "The rows are durable.",
                    "content": {JSON_TYPE: {"schema": {"$ref": "#/components/schemas/Appended"}}},
                },
                **refusals(),
            },
        }
    }


def _tables_path() -> dict[str, Any]:
    rows = {
        "anyOf": [
            {"type": "array", "items": _ROW},
            {"type": "string", "contentEncoding": "base64", "contentMediaType": ARROW_TYPE},
        ]
    }
    body = {
        "type": "object",
        "properties": {"tables": {"type": "object", "additionalProperties": rows}},
        "additionalProperties": False,
        "examples": [{"tables": {"public.orders": [{"id": 1}], "public.lines": [{"order": 1, "sku": "a"}]}}],
    }
    return {
        "post": {
            "operationId": "append_tables",
            "tags": ["write"],
            "summary": "Append rows to several tables as one operation; they are durable when it answers.",
            "description": "Readers see the rows of all tables together or not at all, in the order of the body. A table's rows are JSON objects, or "
            "an Arrow IPC stream as base64.",
            "parameters": [_STREAM, *_OPTIONS],
            "requestBody": {"required": True, "content": {JSON_TYPE: {"schema": body}}},
            "responses": {
                "200": {
                    "description": "The rows are durable.",
                    "content": {JSON_TYPE: {"schema": {"$ref": "#/components/schemas/AppendedTables"}}},
                },
                **refusals(),
            },
        }
    }


def _lines_path(name: str, parameter: str, summary: str) -> dict[str, Any]:
    return {
        "post": {
            "operationId": name,
            "tags": ["write"],
            "summary": summary,
            "description": "A measurement is a table, tags and fields are its columns. Lines that are wrong are told by their number (400); the others "
            "are durable.",
            "parameters": [
                {"name": parameter, "in": "query", "required": True, "schema": {"type": "string"}},
                *([{"name": "org", "in": "query", "schema": {"type": "string"}}] if parameter == "bucket" else []),
                {
                    "name": "precision",
                    "in": "query",
                    "schema": {"type": "string", "examples": ["ns", "us", "ms", "s"]},
                    "description": "Unit of the timestamps; nanoseconds by default.",
                },
                _DEADLINE,
                _ENCODING,
                _ACKS,
                KEY,
            ],
            "requestBody": {
                "required": True,
                "content": {"text/plain": {"schema": {"type": "string", "examples": ["clicks,page=/ ms=12.5"]}}},
            },
            "responses": {
                "204": {
                    "description": "All lines are durable. Where some aren't, a 400 has this header too, if others are.",
                    "headers": {
                        POSITION_HEADER: {"description": "The lines' position, a token.", "schema": {"type": "string"}}
                    },
                },
                **refusals(JSON_TYPE, "LineError"),
            },
        }
    }


def with_writes(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with the paths that take writes, and the schemas that it names."""
    for path, operations in document["paths"].items():
        for operation in operations.values():
            said = operation["responses"]
            # FastAPI's answer for unreadable requests is replaced by ours.
            if "422" in said or path.startswith("/v1/"):
                said.update(
                    {status: text for status, text in refusals().items() if status not in said or status == "422"}
                )
    document["paths"].update(
        {
            "/v1/streams/{stream}/tables/{table}": _rows_path(),
            "/v1/streams/{stream}/tables": _tables_path(),
            "/api/v2/write": _lines_path(
                "write_lines_v2", "bucket", "Append InfluxDB line protocol, as clients of versions 2 and 3 send it."
            ),
            "/write": _lines_path(
                "write_lines_v1", "db", "Append InfluxDB line protocol, as clients of version 1 send it."
            ),
        }
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["AppendedTables"] = dict(_APPENDED_TABLES)
    schemas.update({"Problem": dict(PROBLEM), "Appended": dict(_APPENDED), "LineError": dict(_INFLUX_ERROR)})
    return document
