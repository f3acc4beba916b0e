"""HTML that is made here: every text is escaped, and an area's differences are its changed parts."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from millstream.console.html import Html, Part, Rendered, opened, tag, with_code
from millstream.console.page_frame import address
from millstream.model.human_text import readable


class Seen(HTMLParser):
    """The elements and the text that a browser reads in HTML."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@given(st.text(), st.text())
def test_no_text_becomes_markup(content: str, value: str) -> None:
    seen = Seen(tag("p", content, ["x", content], data_of=value))
    assert seen.tags == [("p", {"data-of": readable(value)})]
    assert seen.text == f"{readable(content)}x{readable(content)}"


def test_a_field_sends_a_name_as_it_is() -> None:
    name = 'a\x1b"b'
    assert Seen(opened("input", type="hidden", name="table", value=name)).tags == [
        ("input", {"type": "hidden", "name": "table", "value": name})
    ]


@given(st.text(alphabet="<`a&;"))
def test_code_in_a_text_is_marked_and_nothing_else_is(text: str) -> None:
    seen = Seen("".join(tag("span", piece) if not isinstance(piece, Html) else piece for piece in with_code(text)))
    assert {name for name, _ in seen.tags} <= {"span", "code"}
    if text.count("`") % 2 == 0 and "``" not in text:
        assert seen.text == text.replace("`", "")


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1), min_size=1))
def test_an_address_keeps_each_part_of_its_path(parts: list[str]) -> None:
    from urllib.parse import unquote

    found = address(*parts)
    assert [unquote(part) for part in found.split("/")[1:]] == parts
    assert not {".", ".."} & set(found.split("/"))


def area(*texts: str) -> Rendered:
    parts = [Part(f"p{number}", tag("li", text, id=f"p{number}")) for number, text in enumerate(texts)]
    return Rendered([Html("<ul>"), *parts, Html("</ul>")])


def test_a_difference_is_the_parts_that_changed_and_the_whole_if_there_are_others() -> None:
    before = area("a", "b")
    assert before.since(None) == {"whole": {"live": '<ul><li id="p0">a</li><li id="p1">b</li></ul>'}}
    assert area("a", "b").since(before) == {}
    assert area("a", "c").since(before) == {"parts": {"p1": '<li id="p1">c</li>'}}
    assert area("a").since(before) == {"whole": {"live": '<ul><li id="p0">a</li></ul>'}}
    assert area("a", "b").version == before.version != area("b", "a").version
