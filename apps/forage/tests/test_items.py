"""Each rule of an item, and the field that its error names."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream_forage.errors import InvalidField
from millstream_forage.items import CONTENT_TYPES, RULES, new_item

BODY: dict[str, Any] = {
    "url": "https://tides.example/tables?year=2026",
    "title": "How to Read a Tide Table",
    "creator": "Finn Aldous",
    "category": "sea",
    "source": "Open Lecture",
    "tags": ["tides", "navigation"],
    "entities": ["Skagen"],
    "content_type": "tutorial",
    "summary": "Twelfths and springs are all you need. Is it 3.5 m deep at noon?",
    "words": 1001,
}


def test_a_good_item_is_returned_with_its_reading_time() -> None:
    item = new_item(BODY)
    assert (item.url, item.tags, item.entities) == (BODY["url"], ("tides", "navigation"), ("Skagen",))
    assert item.reading_time_min == 6
    assert new_item(BODY | {"reading_time_min": 6}) == item
    assert new_item(BODY | {"words": 1000}).reading_time_min == 5
    assert new_item(BODY | {"entities": []}).entities == ()


@pytest.mark.parametrize("name", RULES)
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(InvalidField, match="missing") as caught:
        new_item({key: value for key, value in BODY.items() if key != name})
    assert caught.value.field == name


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("value", [None, True, 1.5, {}, -1, "", "\n", [], [1, 2], ["", "x"]], ids=repr)
def test_a_value_of_the_wrong_type_or_range_is_named(name: str, value: object) -> None:
    if name == "entities" and value == []:
        return
    with pytest.raises(InvalidField) as caught:
        new_item(BODY | {name: value})
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("url", "ftp://tides.example/a"),
        ("url", "javascript:alert(1)"),
        ("url", "https://"),
        ("url", "https://tides.example:port/"),
        ("url", "https://[tides.example/"),
        ("url", "https://tides.example/a b"),
        ("url", "https://tides.example/" + "a" * 2048),
        ("title", "a\x00b"),
        ("title", "half a pair \ud800"),
        ("title", "t" * 301),
        ("category", "c" * 101),
        ("category", "\u200b"),
        ("source", "\ufeff\u00ad"),
        ("creator", " \u0301"),
        ("tags", ["tides"]),
        ("tags", ["a", "b", "c", "d", "e", "f"]),
        ("tags", ["tides", "Navigation"]),
        ("tags", ["tides", "tides"]),
        ("tags", "tides"),
        ("entities", ["1", "2", "3", "4", "5", "6"]),
        ("content_type", "Analysis"),
        ("content_type", "poem"),
        ("summary", "One sentence only."),
        ("summary", "One. Two. Three."),
        ("summary", "One. Two without an end"),
        ("summary", "One. ."),
        ("summary", "Dr. Marsh counts swifts. He counts well."),
        ("words", 0),
        ("words", 10_000_001),
        ("words", "1001"),
        ("words", 1001.0),
        ("reading_time_min", 5),
        ("reading_time_min", 6.0),
        ("reading_time_min", None),
        ("embedding", [0.1]),
    ],
)
def test_a_broken_rule_is_named(name: str, value: object) -> None:
    with pytest.raises(InvalidField) as caught:
        new_item(BODY | {name: value})
    assert caught.value.field == name


@pytest.mark.parametrize(
    "summary",
    ["Really?! Yes...", "A 2.5 m wave! It broke at home.example today.", "Eins ist da.  Zwei? ", "見た! 来た。勝った."],
)
def test_a_sentence_ends_before_a_space_or_the_end(summary: str) -> None:
    assert new_item(BODY | {"summary": summary}).summary == summary


@pytest.mark.parametrize("content_type", CONTENT_TYPES)
def test_every_kind_of_content_is_taken(content_type: str) -> None:
    assert new_item(BODY | {"content_type": content_type}).content_type == content_type


@pytest.mark.parametrize("body", [None, [], "text", 7])
def test_a_body_that_is_no_object_is_refused(body: object) -> None:
    with pytest.raises(InvalidField, match="object"):
        new_item(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*BODY, "reading_time_min"]) | st.text(), JSON))
def test_any_json_gives_an_item_or_the_name_of_a_field(changed: dict[str, Any]) -> None:
    body = BODY | changed
    try:
        item = new_item(body)
    except InvalidField as error:
        broken = error.field
    else:
        broken = "title"
        assert item.title.encode()
    assert broken in body
