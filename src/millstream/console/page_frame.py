"""The frame of every page: head, navigation, the age of the data, and the pages for logging in and for errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from urllib.parse import quote

from millstream.console.html import Content, Html, Rendered, opened, tag, with_code
from millstream.errors import MillstreamError
from millstream.model.human_text import human_seconds

PAGES: Final = {
    "/": "Overview",
    "/tables": "Tables",
    "/log": "Log",
    "/query": "Query",
    "/diff": "Diff",
    "/consumers": "Consumers",
    "/nodes": "Nodes",
    "/charts": "Charts",
}
"""Titles of the pages in the navigation, by path. `routes.Console` serves each."""


FRESH_S: Final = 3.0
"""Older data shows its age; so it does in `console.js`."""


def link(text: str, *path: str, parameters: str = "") -> Html:
    """Return a link to a page; the parts of its path are quoted."""
    return tag("a", text, href=address(*path) + parameters)


def address(*path: str) -> str:
    """Return the address of a page; `.` and `..` as a part of it stay names."""
    return "/" + "/".join(
        quote(part, safe="").replace(".", "%2E") if part in {".", ".."} else quote(part, safe="") for part in path
    )


def page(
    path: str,
    title: str,
    home: str,
    area: Rendered | None,
    *rest: Content,
    versions: Sequence[str],
    user: str | None = None,
    age_s: float = 0.0,
) -> bytes:
    """Return a whole page.

    Args:
        path: its path, as the browser asked for it.
        area: the live area; None for a page that doesn't change.
        versions: addresses of stylesheet, script and icon.
        user: the name of the token that the viewer logged in with.
        age_s: the age of the area's data.
    """
    style, script, icon = versions
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} · {home}"),
        tag("link", rel="stylesheet", href=style),
        tag("link", rel="icon", href=icon, type="image/svg+xml"),
        tag("script", src=script, defer=True),
    )
    links = [
        tag("li", tag("a", name, href=each, aria_current="page" if _is_under(path, each) else None))
        for each, name in PAGES.items()
    ]
    logout = tag(
        "form",
        tag("button", f"Log out {user}", type="submit"),
        method="post",
        action="/console/logout",
        class_="logout",
    )
    header = tag(
        "header",
        tag("a", "Skip to the content", href="#main", class_="skip"),
        tag("p", tag("strong", "Millstream"), " ", tag("span", home, class_="home"), class_="name"),
        tag("nav", tag("ul", *links), aria_label="Pages"),
        tag("p", "" if area is None else _age_words(age_s), id="age", class_="age", data_age=f"{age_s:.3f}"),
        None if user is None else logout,
    )
    live = None
    if area is not None:
        # The area is long, and HTML already.
        live = Html(f"{opened('div', id='live', data_path=path, data_version=area.version)}{area.whole}</div>")
    main = tag("main", tag("h1", title), live, *rest, id="main", tabindex="-1")
    status = tag("p", role="status", id="said", class_="said")
    return f"<!doctype html>{tag('html', head, tag('body', header, main, status), lang='en')}".encode()


def error_content(error: MillstreamError) -> Html:
    """Return an error with its code, its hint and the command in it."""
    first, *lines = error.message.splitlines() or [""]
    return tag(
        "div",
        tag("p", tag("code", error.code), " ", first),
        # Such as a parser's, which points at a place of the line above.
        tag("p", *(tag("code", line, tag("br")) for line in lines), class_="lines") if lines else None,
        tag("p", with_code(error.hint), class_="hint") if error.hint else None,
        class_="trouble error",
        role="alert",
    )


def login_content(back: str, error: MillstreamError | None) -> list[Content]:
    """Return the form in which a viewer presents a token.

    Args:
        back: the path to go to afterwards.
        error: why the last token wasn't accepted.
    """
    return [
        None if error is None else error_content(error),
        tag(
            "form",
            tag("label", "Access token", for_="token"),
            tag("input", id="token", name="token", type="password", autocomplete="current-password", required=True),
            tag("input", name="next", type="hidden", value=back),
            tag("button", "Log in", type="submit"),
            tag("p", with_code("`millstream token create` makes one. This browser keeps a session, not the token.")),
            method="post",
            action="/console/login",
            class_="login",
        ),
    ]


def _age_words(age_s: float) -> str:
    """Return the age of a page's data, as its script shows it once it runs."""
    return "as of this moment" if age_s < FRESH_S else f"data of {human_seconds(age_s)} ago"


def _is_under(path: str, page: str) -> bool:
    return path == page or (page != "/" and path.startswith(f"{page}/"))
