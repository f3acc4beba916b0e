"""The error tree: every error has a code of its own, survives a pickle, and shows only the details it was given."""

from __future__ import annotations

import json
import pickle

import pytest

import millstream.errors as errors_module
from millstream.errors import MillstreamError


def tree(kind: type[MillstreamError]) -> list[type[MillstreamError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in tree(child))]


KINDS = [kind for kind in tree(MillstreamError) if kind.__module__.startswith(errors_module.__name__)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_crosses_a_process_border_whole(kind: type[MillstreamError]) -> None:
    error = kind("it happened", hint="do this", file="a.wal", byte=7, inner=ValueError("x"))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (copy.message, copy.hint, copy.details["byte"]) == ("it happened", "do this", 7)
    facts = json.loads(json.dumps(copy.as_dict()))
    assert facts["code"] == kind.code
    assert facts["details"]["inner"] == "x"
    assert facts["retry"] in {"never", "backoff", "reopen", "operator"}


def test_codes_are_unique() -> None:
    codes = [kind.__dict__.get("code") for kind in KINDS]
    assert None not in codes
    assert len(set(codes)) == len(codes)


def test_every_error_documents_itself() -> None:
    assert [kind.__name__ for kind in KINDS if not kind.__doc__] == []


def test_the_default_hint_stands_in() -> None:
    assert "millstream init" in errors_module.HomeNotFound("none").hint
