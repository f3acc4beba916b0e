"""The error tree: every error has a code of its own, survives a pickle, and shows only the details it was given."""

from __future__ import annotations

import ast
import json
import pickle
from pathlib import Path

import pytest

import millstream
import millstream.errors as errors_module
from millstream.errors import MillstreamError, Retry, codes_of, error_of
from millstream.model.addresses import IN_CATALOG

Kind = tuple[type[MillstreamError], str]
KINDS: list[Kind] = [
    (kind, code) for kind, code in codes_of(MillstreamError) if kind.__module__.startswith(errors_module.__name__)
]
CODES = [code for _, code in KINDS]
SHARED = {
    (errors_module.ConfigError, "unknown_column"),
    (errors_module.ConfigError, "unknown_table"),
    (errors_module.LakeUnavailable, "catalog_unreachable"),
}
"""A rule's error has the code that an append's has: only capture and the configuration raise it, and no client gets it as a
class. An Iceberg lake's catalog has the code of the home's: across a process border it is the home's class, which is retried alike."""


def test_a_lake_in_the_catalogs_place_is_not_named_by_an_address_that_nobody_wrote() -> None:
    path = f"{IN_CATALOG}/shop/current/public.orders"
    error = errors_module.LakeUnavailable(f"{path}: no answer", path=path)
    assert (error.message, error.details["path"]) == (
        "shop/current/public.orders: no answer",
        "shop/current/public.orders",
    )
    assert errors_module.LakeError(f"{IN_CATALOG}: no answer").message == "the lake in the catalog: no answer"


@pytest.mark.parametrize("kind", KINDS, ids=CODES)
def test_an_error_crosses_a_process_border_whole(kind: Kind) -> None:
    error = kind[0]("it happened", code=kind[1], hint="do this", file="a.wal", byte=7, inner=ValueError("x"))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind[0]
    assert (copy.message, copy.hint, copy.details["byte"]) == ("it happened", "do this", 7)
    assert (copy.code, copy.retry, copy.exit_code) == (kind[1], error.retry, error.exit_code)
    facts = json.loads(json.dumps(copy.as_dict()))
    assert facts["code"] == kind[1]
    assert facts["details"]["inner"] == "x"
    assert facts["retry"] in {"never", "backoff", "reopen", "operator"}
    if kind in SHARED:
        return
    again = error_of(facts)
    assert (type(again), again.as_dict()) == (kind[0], facts)


def test_a_newer_version_s_code_is_an_error_without_a_class() -> None:
    told = MillstreamError("it happened", hint="do this").as_dict() | {"code": "of_tomorrow"}
    assert (type(error_of(told)), error_of(told).message) == (MillstreamError, "it happened")


def test_codes_are_unique() -> None:
    assert all("code" in vars(kind) for kind, _ in KINDS)
    assert sorted(CODES) == sorted([*set(CODES), *(code for _, code in SHARED)])


def test_every_code_documents_itself() -> None:
    assert [code for kind, code in KINDS if not kind("", code=code).summary] == []


def test_a_code_s_own_hint_and_retry_stand_in() -> None:
    slot = errors_module.SourceError("none", code="no_free_slot")
    assert (slot.code, "drop an unused slot" in slot.hint) == ("no_free_slot", True)
    dsn = errors_module.SourceError("it isn't one", code="wal_level_not_logical")
    assert ("ALTER SYSTEM" in dsn.hint, dsn.retry, type(dsn).retry) == (True, Retry.OPERATOR, Retry.OPERATOR)
    gone = errors_module.SourceError("no answer", code="source_unreachable")
    assert (gone.retry, type(gone).retry) == (Retry.BACKOFF, Retry.OPERATOR)
    with pytest.raises(KeyError):
        errors_module.SourceError("it happened", code="home_busy")


def raised(path: Path) -> list[tuple[str, str, int]]:
    """Return each class that is called with a constant `code=`, the code, and the line."""
    return [
        (node.func.id, word.value.value, node.lineno)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and hasattr(errors_module, node.func.id)
        for word in node.keywords
        if word.arg == "code" and isinstance(word.value, ast.Constant) and isinstance(word.value.value, str)
    ]


def test_every_code_that_the_source_raises_is_one_of_its_class() -> None:
    found = [(path, *one) for path in Path(millstream.__file__).parent.rglob("*.py") for one in raised(path)]
    known = {(kind.__name__, code) for kind, code in KINDS}
    assert len(found) > 30
    assert [one for one in found if one[1:3] not in known] == []


def yielded(path: Path) -> list[tuple[str, int]]:
    """Return the code and the line of each mistake that a check of the configuration yields with a code."""
    return [
        (code.value, node.lineno)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 3
        for code in [node.value.elts[1]]
        if isinstance(code, ast.Constant) and isinstance(code.value, str)
    ]


def test_every_code_of_a_mistake_in_the_configuration_is_one_of_its_error() -> None:
    folder = Path(millstream.__file__).parent / "config"
    found = [(path.name, *one) for path in folder.glob("*.py") for one in yielded(path)]
    known = {"config", *errors_module.ConfigError.codes}
    assert len(found) > 5
    assert [one for one in found if one[1] not in known] == []


def test_a_code_of_two_classes_is_the_class_named_after_it() -> None:
    facts = errors_module.UnknownTable("it happened").as_dict()
    assert type(error_of(facts)) is errors_module.UnknownTable
