"""`token`: who may read and write which streams over the network."""

from __future__ import annotations

import sys
from typing import Any

import click

from millstream.cli.context import (
    Session,
    SuggestingGroup,
    json_option,
    note,
    pass_session,
    print_json,
    print_raw,
    print_table,
)


@click.group(cls=SuggestingGroup, invoke_without_command=True)
@click.pass_context
def token(context: click.Context) -> None:
    """Access tokens, for those who call over the network. Without a command: ls."""
    if context.invoked_subcommand is None:
        context.invoke(ls)


@token.command("create")
@click.option("--name", metavar="N", help="Tells it apart from others.  [default: its id]")
@click.option(
    "--stream",
    "streams",
    multiple=True,
    metavar="S=RIGHT",
    help="A stream and what may be done with it: read, write, admin (both, and what changes how it works), or several with commas between; repeat it.",
)
@click.option("--all", "on_all", multiple=True, metavar="RIGHT", help="The same of every stream, also of later ones.")
@click.option("--expires", metavar="TIME", help="After how long it holds no more, such as 30d.  [default: never]")
@click.option(
    "--given", is_flag=True, help="Read from stdin a token that another home has made, and have it hold here too."
)
@json_option
@pass_session
def create(
    session: Session,
    name: str | None,
    streams: tuple[str, ...],
    on_all: tuple[str, ...],
    expires: str | None,
    given: bool,
    as_json: bool,
) -> None:
    """Make a token and print it, this once: what is kept of it is a hash."""
    from millstream.app.tokens import create_token

    text_given = sys.stdin.readline().strip() if given else None
    facts, text = create_token(
        session.home(needs_source=False), streams, on_all=on_all, name=name, expires=expires, given=text_given
    )
    if as_json:
        print_json({**facts, "token": text})
        return
    if not given:
        print_raw(text)
    until = "until it is revoked" if facts["expires"] is None else f"until {facts['expires']}"
    note(
        f"Token {facts['name']} may {_words(facts['rights'])}, {until}.{'' if given else ' Keep it now: nobody can show it again.'}"
    )


@token.command("ls")
@json_option
@pass_session
def ls(session: Session, as_json: bool = False) -> None:
    """List the home's tokens: names and rights, never the tokens themselves."""
    from millstream.app.tokens import list_tokens

    found = list_tokens(session.home(needs_source=False))
    if as_json:
        print_json(found)
        return
    if not found:
        note("there is no token; `millstream token create` makes one")
        return
    rows = [
        [
            one["name"],
            one["id"],
            _words(one["rights"]),
            one["created"],
            f"{one['expires'] or 'never'}{' (it has)' if one['expired'] else ''}",
        ]
        for one in found
    ]
    print_table(["name", "id", "may", "made", "expires"], rows)


@token.command("revoke")
@click.argument("token", metavar="NAME|ID")
@pass_session
def revoke(session: Session, token: str) -> None:
    """Take a token away. A running server refuses it within two seconds."""
    from millstream.app.tokens import revoke_token

    gone = revoke_token(session.home(needs_source=False), token)
    note(f"Token {gone['name']} ({gone['id']}) is revoked.")


def _words(rights: dict[str, Any]) -> str:
    return "; ".join(
        f"{', '.join(said)} {'all streams' if stream == '*' else stream}" for stream, said in rights.items()
    )
