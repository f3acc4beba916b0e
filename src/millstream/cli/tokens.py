"""`token`: who may read and write which streams over the network."""

from __future__ import annotations

import sys
from typing import Any

import click

from millstream.cli.context import (
    Invocation,
    SuggestingGroup,
    json_option,
    note,
    pass_invocation,
    print_json,
    print_raw,
    print_table,
)


@click.group(cls=SuggestingGroup, invoke_without_command=True)
@click.pass_context
def token(context: click.Context) -> None:
    """Manage access tokens for calls over the network. Without a command: ls."""
    if context.invoked_subcommand is None:
        context.invoke(ls)


@token.command("create")
@click.option("--name", metavar="N", help="Name of the token.  [default: its id]")
@click.option(
    "--stream",
    "streams",
    multiple=True,
    metavar="S=RIGHT",
    help="A stream and its rights: read, write, admin (both, and changes of its operation), or several separated "
    "by commas; may be repeated.",
)
@click.option("--all", "on_all", multiple=True, metavar="RIGHT", help="Rights on every stream, including later ones.")
@click.option("--expires", metavar="TIME", help="Time until it expires, such as 30d.  [default: never]")
@click.option("--given", is_flag=True, help="Read a token of another home from stdin, and accept it here too.")
@json_option
@pass_invocation
def create(
    invocation: Invocation,
    name: str | None,
    streams: tuple[str, ...],
    on_all: tuple[str, ...],
    expires: str | None,
    given: bool,
    as_json: bool,
) -> None:
    """Create a token and print it once: the home stores only its hash."""
    from millstream.administration.access_token_requests import create_token

    text_given = sys.stdin.readline().strip() if given else None
    facts, text = create_token(
        invocation.home(needs_source=False), streams, on_all=on_all, name=name, expires=expires, given=text_given
    )
    if as_json:
        print_json({**facts, "token": text})
        return
    if not given:
        print_raw(text)
    until = "until it is revoked" if facts["expires"] is None else f"until {facts['expires']}"
    note(
        f"Token {facts['name']}: {_words(facts['rights'])}, {until}.{'' if given else ' Store it now: it is not shown again.'}"
    )


@token.command("ls")
@json_option
@pass_invocation
def ls(invocation: Invocation, as_json: bool = False) -> None:
    """List the home's tokens: names and rights, never the tokens."""
    from millstream.administration.access_token_requests import list_tokens

    found = list_tokens(invocation.home(needs_source=False))
    if as_json:
        print_json(found)
        return
    if not found:
        note("there is no token; create one with `millstream token create`")
        return
    rows = [
        [
            one["name"],
            one["id"],
            _words(one["rights"]),
            one["created"],
            f"{one['expires'] or 'never'}{' (expired)' if one['expired'] else ''}",
        ]
        for one in found
    ]
    print_table(["name", "id", "may", "made", "expires"], rows)


@token.command("revoke")
@click.argument("token", metavar="NAME|ID")
@pass_invocation
def revoke(invocation: Invocation, token: str) -> None:
    """Revoke a token. A running server rejects it within two seconds."""
    from millstream.administration.access_token_requests import revoke_token

    gone = revoke_token(invocation.home(needs_source=False), token)
    note(f"Token {gone['name']} ({gone['id']}) is revoked.")


def _words(rights: dict[str, Any]) -> str:
    return "; ".join(
        f"{', '.join(said)} on {'all streams' if stream == '*' else stream}" for stream, said in rights.items()
    )
