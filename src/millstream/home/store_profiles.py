"""Keys of an object store by the name of a profile in the AWS files of this user.

The profile is read here, by the driver: executors don't have its file, and delta-rs reads profiles for Amazon's own
store alone.
"""

from __future__ import annotations

import configparser
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from millstream.errors import LakeUnavailable

_PROFILE: Final = "AWS_PROFILE"
_KEY: Final = "AWS_ACCESS_KEY_ID"
_TAKEN: Final = (_KEY, "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def with_profile(options: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return a store's options with a profile's keys in place of the profile's name.

    A profile that the environment names is used if neither has keys; if it has none either, it is left to the store's client,
    which may get keys for it from elsewhere.

    Raises:
        LakeUnavailable (`lake_credentials`): the options name a profile without keys in its file.
    """
    found = dict(options)
    named = found.pop(_PROFILE, None)
    if _KEY in found or (named is None and _KEY in environ):
        return found
    profile = named or environ.get(_PROFILE)
    if not profile:
        return found
    facts: dict[str, str] = {}
    for file, section in _places(profile, environ):
        # The first file that has the keys wins, as in Amazon's own clients.
        facts = _section(file, section) | facts
    if "aws_access_key_id" in facts and "aws_secret_access_key" in facts:
        keys = {name: facts[name.lower()] for name in _TAKEN if name.lower() in facts}
        region = {} if "AWS_REGION" in found or "region" not in facts else {"AWS_REGION": facts["region"]}
        return found | keys | region
    if named is None:
        return found
    files = ", ".join(str(file) for file, _ in _places(profile, environ))
    raise LakeUnavailable(
        f"the profile {profile} of AWS_PROFILE has no aws_access_key_id and aws_secret_access_key in {files}",
        code="lake_credentials",
        hint="Write both into the profile; for other kinds of keys leave AWS_PROFILE out of storage_options, and put it into the "
        "environment.",
    )


def _places(profile: str, environ: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    folder = Path(environ.get("HOME", "~")).expanduser() / ".aws"
    yield Path(environ.get("AWS_SHARED_CREDENTIALS_FILE") or folder / "credentials"), profile
    yield (
        Path(environ.get("AWS_CONFIG_FILE") or folder / "config"),
        profile if profile == "default" else f"profile {profile}",
    )


def _section(file: Path, name: str) -> dict[str, str]:
    parser = configparser.RawConfigParser(default_section="")
    try:
        parser.read_string(file.read_text(encoding="utf-8"), str(file))
        return dict(parser.items(name))
    except (OSError, UnicodeDecodeError, configparser.Error):
        return {}
