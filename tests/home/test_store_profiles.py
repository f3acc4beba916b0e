"""A profile of the AWS files gives a lake's keys, as in Amazon's own clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.errors import LakeUnavailable
from millstream.home.store_profiles import with_profile

KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret"}


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        "[mine]\naws_access_key_id = id\naws_secret_access_key = secret\n"
        "[session]\naws_access_key_id = id\naws_secret_access_key = secret\naws_session_token = token\n"
    )
    (tmp_path / ".aws" / "config").write_text(
        "[default]\nregion = us-east-1\n[profile mine]\nregion = eu-west-1\naws_access_key_id = older\n"
        "[profile login]\nsso_session = company\n"
    )
    return {"HOME": str(tmp_path)}


def test_a_profile_gives_its_keys_and_its_region(environ: dict[str, str]) -> None:
    found = with_profile({"AWS_PROFILE": "mine", "AWS_ENDPOINT_URL": "http://h"}, environ)
    assert found == KEYS | {"AWS_REGION": "eu-west-1", "AWS_ENDPOINT_URL": "http://h"}
    assert with_profile({"AWS_PROFILE": "mine", "AWS_REGION": "x"}, environ) == KEYS | {"AWS_REGION": "x"}
    assert with_profile({"AWS_PROFILE": "session"}, environ) == KEYS | {"AWS_SESSION_TOKEN": "token"}


def test_keys_go_before_a_profile_and_the_file_before_the_environment(environ: dict[str, str]) -> None:
    given = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    assert with_profile(given | {"AWS_PROFILE": "mine"}, environ) == given
    assert with_profile(given, environ | {"AWS_PROFILE": "mine"}) == given
    assert with_profile({}, environ | KEYS | {"AWS_PROFILE": "mine"}) == {}
    assert with_profile({"AWS_PROFILE": "session"}, environ | {"AWS_PROFILE": "mine"})["AWS_SESSION_TOKEN"] == "token"
    assert with_profile({}, environ | {"AWS_PROFILE": "mine"}) == KEYS | {"AWS_REGION": "eu-west-1"}
    assert with_profile({}, environ) == {}


def test_a_profile_without_keys_is_an_error_where_the_file_names_it(environ: dict[str, str]) -> None:
    for profile in ("login", "missing"):
        with pytest.raises(
            LakeUnavailable, match=f"the profile {profile} of AWS_PROFILE has no aws_access_key_id"
        ) as caught:
            with_profile({"AWS_PROFILE": profile}, environ)
        assert caught.value.code == "lake_credentials"
        assert with_profile({}, environ | {"AWS_PROFILE": profile}) == {}
