"""An error of another node, as this node reports it."""

from __future__ import annotations

import pytest

from millstream.errors import AccessError, Unauthenticated
from millstream.leadership.node_calls import told_by
from millstream.replication.flight.address import LeaderAddress


@pytest.mark.parametrize(
    "error",
    [
        AccessError("no right to admin", code="forbidden", right="admin"),
        Unauthenticated("the token has expired", code="access_token_expired"),
        Unauthenticated("no token"),
    ],
)
def test_a_refusal_of_another_node_keeps_its_code_and_names_the_node(error: AccessError) -> None:
    told = told_by(LeaderAddress("grpc://127.0.0.1:1"), "b", error)
    assert (type(told), told.code, told.details) == (type(error), error.code, error.details)
    assert "node b" in told.message
    assert "[replication] token" in told.hint
