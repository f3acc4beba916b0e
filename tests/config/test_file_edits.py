"""A command replaces one key of the configuration, and nothing else of it."""

from __future__ import annotations

import tomllib

import pytest

from millstream.config.file_edits import with_location

URL = 's3://bucket/a "quoted" place'


@pytest.mark.parametrize(
    "text",
    [
        '[streams.shop.lake]    # its lake\nlocation = "lake"    # a folder\nformat = "delta"\n',
        "[streams.shop]\nlake.location = 'lake'# here\n",
        '[streams.shop.lake]\n"location"="la\\"ke"\n[streams.web.lake]\nlocation = "other"\n',
        '[streams.shop.lake]\nformat = "delta"\n[spark]\n',
        "[streams.shop.source]\ndsn = 'x'",
        "",
    ],
)
def test_the_location_is_replaced_or_added_and_the_rest_stays(text: str) -> None:
    found = with_location(text, "shop", URL)
    assert found is not None
    before, after = tomllib.loads(text), tomllib.loads(found)
    assert after["streams"]["shop"]["lake"].pop("location") == URL
    before.setdefault("streams", {}).setdefault("shop", {}).setdefault("lake", {}).pop("location", None)
    assert after == before
    assert [line for line in text.splitlines() if "#" in line and "location" not in line] == [
        line for line in found.splitlines() if "#" in line and "location" not in line
    ]
    assert ("# a folder" in found) == ("# a folder" in text)
    assert with_location(found, "shop", URL) == found


@pytest.mark.parametrize(
    "text", ['streams = {shop = {lake = {location = """\nlake"""}}}\n', "[streams.shop]\nlake = {format = 'delta'}\n"]
)
def test_a_form_that_cannot_be_replaced_is_left(text: str) -> None:
    assert with_location(text, "shop", URL) is None
