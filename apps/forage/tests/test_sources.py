"""Sources read into items: feeds, JSON files, folders; what is refused, and what is never fetched."""

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from apps.forage.tests.bodies import ENTRY
from hypothesis import given
from hypothesis import strategies as st

from millstream_forage.errors import InvalidField, RegistryUnreadable, SourceUnreadable
from millstream_forage.fetching import fetch
from millstream_forage.sources import Captured, Registry, Source, add, feed_bodies, json_bodies, plain

RSS = """<?xml version="1.0"?>
<rss version="2.0" xmlns:dc="http://purl.example/dc" xmlns:content="http://purl.example/content"><channel>
<title>Tides</title><link>https://tides.example/</link>
<item><title>The Sea Floor Has Weather</title><link>https://tides.example/1</link><dc:creator>Mara</dc:creator>
<category>Ocean</category><category>Climate</category><category>ocean</category>
<description><![CDATA[<p>Storms of <b>mud</b>. They run for weeks! Then they stop.</p><script>x.y</script>]]></description>
<content:encoded>one two three four</content:encoded></item>
<item><title>Short</title><link>https://tides.example/2</link><description>One sentence.</description></item>
</channel></rss>"""
ATOM = """<feed xmlns="http://www.w3.org/2005/Atom"><title>Tides</title>
<entry><title type="html">Knots &amp;amp; Bends</title><author><name>Finn</name><email>f@tides.example</email></author>
<link rel="self" href="https://tides.example/self"/><link href="https://tides.example/3"/>
<category term="knots"/><summary>Four hold a boat. Learn them.</summary></entry></feed>"""
SOURCE = Source("Tides", "feed", "tides.xml", "sea", ("sailing", "coast"), "tutorial")


def captured_of(content: str) -> Captured:
    found = Captured()
    for body in feed_bodies(SOURCE, content.encode()):
        add(found, SOURCE, body, 1)
    return found


def test_an_rss_entry_becomes_an_item_with_its_first_two_sentences() -> None:
    found = captured_of(RSS)
    (item,) = found.items
    assert (item.url, item.title, item.creator) == ("https://tides.example/1", "The Sea Floor Has Weather", "Mara")
    assert (item.category, item.source, item.content_type) == ("sea", "Tides", "tutorial")
    assert item.tags == ("ocean", "climate")
    assert item.summary == "Storms of mud. They run for weeks!"
    (refused,) = found.refused
    assert (refused.source, refused.entry) == ("Tides", "https://tides.example/2")
    assert refused.reason.startswith("summary: ")


def test_an_atom_entry_gets_the_tags_of_its_source() -> None:
    (item,) = captured_of(ATOM).items
    assert (item.url, item.title, item.creator) == ("https://tides.example/3", "Knots & Bends", "Finn")
    assert item.tags == ("knots", "sailing", "coast")


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_bytes_that_are_no_document_are_unreadable_or_give_no_item(content: bytes) -> None:
    for read in (feed_bodies, json_bodies):
        found = Captured()
        with contextlib.suppress(SourceUnreadable):
            for body in read(SOURCE, content):
                add(found, SOURCE, body, 1)
        assert found.items == []


def test_an_entity_that_expands_without_end_is_unreadable() -> None:
    levels = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 10))
    bomb = f'<!DOCTYPE rss [<!ENTITY e0 "{"x" * 100}">{levels}]><rss><item><title>&e9;</title></item></rss>'
    with pytest.raises(SourceUnreadable, match="no XML"):
        list(feed_bodies(SOURCE, bomb.encode()))


def test_markup_is_left_out_of_a_text() -> None:
    markup = "<p title='a > b' class=it's>Tides<b>!</b><!-- x > y -->A &lt; B<script>if (a<b) y</script > <3 <![x> <a "
    assert plain(markup) == "Tides! A < B <3"


# html.parser raised AssertionError for the first, int() ValueError for the second.
@pytest.mark.parametrize("title", ["Tides<![CDATA[Q <![x> r]]>", f"&amp;#{'9' * 5_000};"])
def test_an_entry_whose_markup_is_broken_stops_no_other(title: str) -> None:
    entry = f"<item><title>{title}</title><link>https://tides.example/9</link></item>"
    found = captured_of(RSS.replace("<item>", f"{entry}<item>", 1))
    assert [item.url for item in found.items] == ["https://tides.example/1"]
    assert [refused.entry for refused in found.refused] == ["https://tides.example/9", "https://tides.example/2"]


# html.parser takes time that grows with the square of the length: hours for each of the first three.
@pytest.mark.parametrize("piece", ["<a ", "<!--", "<a b='", "<", "</", "<![", "<style></style", ". ", "&#1"])
def test_a_long_run_of_broken_markup_is_read_to_its_end(piece: str) -> None:
    count = (1 << 19) // len(piece)
    assert plain(f"Tides {piece * count}").startswith("Tides")


def test_an_entry_within_an_entry_is_none() -> None:
    depth = 50_000
    nest = f"<rss>{'<item><title>x' * depth}{'</title></item>' * depth}</rss>"
    assert len(list(feed_bodies(SOURCE, nest.encode()))) == 1


@pytest.mark.parametrize(
    "document", [ATOM[ATOM.index("<entry>") : -len("</feed>")], f"<rdf>{RSS[RSS.index('<item>') :]}"]
)
def test_entries_may_be_the_root_or_stand_in_it(document: str) -> None:
    document = document.replace("</channel></rss>", "</rdf>").replace("<dc:creator>Mara</dc:creator>", "")
    document = document.replace("content:encoded", "encoded")
    assert len(captured_of(document).items) == 1


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    """A registry of a feed, a JSON file, a folder, and two sources that can't be read."""
    (tmp_path / "tides.xml").write_text(RSS)
    (tmp_path / "items.json").write_text(json.dumps([ENTRY, ENTRY | {"tags": ["one"]}, 7]))
    (tmp_path / "inbox").mkdir()
    (tmp_path / "inbox" / "b.json").write_text(json.dumps(ENTRY | {"source": "Elsewhere", "category": "cities"}))
    (tmp_path / "inbox" / "a.atom").write_text(ATOM)
    (tmp_path / "inbox" / "c.JSON").write_text("{")
    lacking = {name: value for name, value in ENTRY.items() if name not in {"tags", "content_type"}}
    (tmp_path / "inbox" / "d.json").write_text(json.dumps(lacking | {"url": "https://tides.example/6"}))
    (tmp_path / "inbox" / "notes.txt").write_text("no source")
    (tmp_path / "inbox" / ".hidden").write_text("no source")
    (tmp_path / "inbox" / "deeper.xml").mkdir()
    path = tmp_path / "sources.toml"
    path.write_text(
        """
        [[sources]]
        name = "Tides"
        feed = "tides.xml"
        category = "sea"
        [[sources]]
        name = "Harbour Review"
        json = "items.json"
        category = "sea"
        [[sources]]
        name = "Inbox"
        directory = "inbox"
        category = "sea"
        tags = ["inbox", "new"]
        content_type = "opinion"
        [[sources]]
        name = "Gone"
        json = "gone.json"
        category = "sea"
        [[sources]]
        name = "Far"
        feed = "https://far.example/feed.xml"
        category = "sea"
        """
    )
    return path


def test_every_source_is_read_and_one_that_fails_stops_no_other(registry: Path) -> None:
    found = Registry.load(registry).capture()
    assert [(item.source, item.category, item.url[-1]) for item in found.items] == [
        ("Tides", "sea", "1"),
        ("Harbour Review", "sea", "4"),
        ("Inbox", "sea", "3"),
        ("Elsewhere", "cities", "4"),
        ("Inbox", "sea", "6"),
    ]
    assert (found.items[-1].tags, found.items[-1].content_type) == (("inbox", "new"), "opinion")
    reasons = {(refused.source, refused.entry): refused.reason for refused in found.refused}
    assert reasons["Harbour Review", "https://tides.example/4"].startswith("tags: ")
    assert reasons["Harbour Review", "entry 3"] == "body: must be an object"
    inbox = registry.parent / "inbox"
    assert reasons["Inbox", str(inbox / "c.JSON")].startswith(f"{inbox / 'c.JSON'}: is no JSON")
    for name in ("notes.txt", "deeper.xml"):
        assert reasons["Inbox", str(inbox / name)].startswith("is not read: ")
    assert not [name for _, name in reasons if ".hidden" in name]
    assert "No such file" in reasons["Gone", ""]
    assert reasons["Far", ""] == "https://far.example/feed.xml: http is off"
    unread = {(refused.source, refused.entry) for refused in found.refused if refused.is_unread}
    assert unread == {("Inbox", str(inbox / "c.JSON")), ("Gone", ""), ("Far", "")}


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("htttp = true", "htttp"),
        ("http = 1", "http"),
        ("sources = 3", "sources"),
        ("sources = [3]", "sources"),
        ("[[sources]]\nname = 'a'\ncategory = 'b'", "feed"),
        ("[[sources]]\nname = 'a'\ncategory = 'b'\nfeed = 'a'\njson = 'b'", "feed"),
        ("[[sources]]\nname = 'a'\ncategory = 'b'\njson = 'https://a.example/'", "json"),
        ("[[sources]]\ncategory = 'b'\njson = 'a'", "name"),
        ("[[sources]]\nname = 'a'\njson = 'a'", "category"),
        ("[[sources]]\nname = 'a'\ncategory = 'b'\njson = 'a'\nurl = 'c'", "url"),
        ("[[sources]]\nname = 'a'\ncategory = 'b'\njson = 'a'\ncontent_type = 'poem'", "content_type"),
        ("[[sources]]\nname = 'a'\ncategory = 'b'\njson = 'a'\ntags = 'c'", "tags"),
    ],
)
def test_a_wrong_field_of_the_registry_is_named(tmp_path: Path, text: str, field: str) -> None:
    (tmp_path / "sources.toml").write_text(text)
    with pytest.raises(InvalidField) as caught:
        Registry.load(tmp_path / "sources.toml")
    assert caught.value.field == field


@pytest.mark.parametrize(("name", "where"), [("name = 'Tides'", "source 'Tides'"), ("", "source 2")])
def test_a_wrong_field_is_reported_with_its_source(tmp_path: Path, name: str, where: str) -> None:
    good = "[[sources]]\nname = 'a'\ncategory = 'b'\njson = 'c'\n"
    (tmp_path / "sources.toml").write_text(f"{good}[[sources]]\n{name}\njson = 'a'\n")
    missing = "category" if name else "name"
    with pytest.raises(InvalidField) as caught:
        Registry.load(tmp_path / "sources.toml")
    assert caught.value.message == f"{missing}: is missing ({where})"


@pytest.mark.parametrize("content", [None, b"= no toml", b"\xff"])
def test_a_registry_that_is_no_toml_is_unreadable(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "sources.toml").write_bytes(content)
    with pytest.raises(RegistryUnreadable, match=r"sources\.toml"):
        Registry.load(tmp_path / "sources.toml")


class Site(BaseHTTPRequestHandler):
    """A host with a feed, a robots.txt that forbids a part of it, and redirects."""

    asked: list[str]
    robots = "User-agent: *\nDisallow: /private\n"
    robots_status = 200

    def do_GET(self) -> None:
        self.asked.append(self.path)
        status, headers, content = 200, {}, RSS
        if self.path == "/robots.txt":
            status, content = self.robots_status, self.robots
        elif self.path == "/moved":
            status, headers = 302, {"Location": "/feed.xml"}
        elif self.path == "/away":
            status, headers = 302, {"Location": "https://far.example/feed.xml"}
        elif self.path == "/inward":
            status, headers = 302, {"Location": "/private/feed.xml"}
        elif self.path == "/gone":
            status = 410
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content.encode())))
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, *_: object) -> None:
        """Keep the test's output quiet."""
        return


@pytest.fixture
def site() -> Iterator[tuple[str, type[Site]]]:
    """The site's address, and its class with what was asked."""
    kind = type("OneSite", (Site,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", kind
    server.shutdown()
    thread.join()
    server.server_close()


def fetched(address: str) -> Captured:
    """Capture one feed by its address."""
    return Registry((Source("Tides", "feed", address, "sea"),), http=True).capture()


def test_a_feed_is_fetched_if_its_host_allows_it(site: tuple[str, type[Site]]) -> None:
    address, kind = site
    assert len(fetched(f"{address}/feed.xml").items) == 1
    assert len(fetched(f"{address}/moved").items) == 1
    kind.robots_status = 404
    assert len(fetched(f"{address}/private/feed.xml").items) == 1


@pytest.mark.parametrize(
    ("path", "robots_status", "reason", "asked"),
    [
        ("/private/feed.xml", 200, "robots.txt forbids it", ["/robots.txt"]),
        ("/feed.xml", 503, "robots.txt: HTTP Error 503", ["/robots.txt"]),
        ("/gone", 200, "HTTP Error 410", ["/robots.txt", "/gone"]),
        ("/inward", 200, "/private/feed.xml, which robots.txt forbids", ["/robots.txt", "/inward"]),
        ("/away", 200, "leads to https://far.example/feed.xml", ["/robots.txt", "/away"]),
    ],
)
def test_a_feed_that_may_not_be_fetched_is_refused(
    site: tuple[str, type[Site]], path: str, robots_status: int, reason: str, asked: list[str]
) -> None:
    address, kind = site
    kind.robots_status = robots_status
    found = fetched(address + path)
    assert found.items == []
    assert reason in found.refused[0].reason
    assert kind.asked == asked


def test_rules_behind_a_byte_order_mark_are_kept(site: tuple[str, type[Site]]) -> None:
    address, kind = site
    kind.robots = f"\ufeff{kind.robots}"
    assert "robots.txt forbids it" in fetched(f"{address}/private/feed.xml").refused[0].reason
    assert kind.asked == ["/robots.txt"]


def test_a_document_that_takes_too_long_is_refused(site: tuple[str, type[Site]]) -> None:
    address, _ = site
    assert fetch(f"{address}/feed.xml", bytes_max=4_096, clock=itertools.count().__next__) == RSS.encode()
    with pytest.raises(SourceUnreadable, match="takes longer than 60 s"):
        fetch(f"{address}/feed.xml", bytes_max=4_096, clock=itertools.count(step=61).__next__)


def test_a_host_that_does_not_answer_is_refused() -> None:
    assert fetched("http://127.0.0.1:1/feed.xml").refused[0].reason.startswith("http://127.0.0.1:1/robots.txt: ")
