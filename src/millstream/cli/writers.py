"""`writers`: the processes that share a stream, and giving one up."""

from __future__ import annotations

import click

from millstream.cli.context import (
    Invocation,
    SuggestingGroup,
    confirm,
    json_option,
    note,
    pass_invocation,
    print_json,
    print_table,
    say,
    stream_option,
)


@click.group(cls=SuggestingGroup, invoke_without_command=True)
@click.pass_context
def writers(context: click.Context) -> None:
    """Show the writers that share a stream, and the one that readers wait for. Without a command: ls."""
    if context.invoked_subcommand is None:
        context.invoke(ls)


@writers.command("ls")
@stream_option
@json_option
@pass_invocation
def ls(invocation: Invocation, stream: str | None = None, as_json: bool = False) -> None:
    """List a stream's writers: state, epoch, position, and location of their logs."""
    from millstream.writers.writer_facts import list_writers

    found = list_writers(invocation.home(needs_source=False), stream)
    if as_json:
        print_json(found)
        return
    if not found["writers"]:
        note(f"{found['stream']} has one writer, which owns it")
        return
    titles = ["number", "writer", "state", "epoch", "position", "behind", "log"]
    rows = [
        [
            str(one["number"]),
            one["name"],
            one["state"],
            str(one["epoch"]),
            f"{one['position']:,}",
            f"{one['behind']:,}",
            one["location"],
        ]
        for one in found["writers"]
    ]
    print_table(titles, rows, right=[titles[0], *titles[3:6]])
    say(f"linear readers may read up to {found['persisted_upto']:,} of {found['newest']:,} allocated numbers")


@writers.command("forget")
@click.argument("name")
@stream_option
@click.option("--yes", is_flag=True, help="Don't ask for confirmation.")
@pass_invocation
def forget(invocation: Invocation, name: str, stream: str | None, yes: bool) -> None:
    """Give up a dead writer whose log is lost: readers skip its undecided records.

    If its log is in this home, the writer is recovered instead, and nothing is lost. Otherwise its
    last commit group may be given up, although readers of that log may have read it. If that log
    returns and the writer starts there, those records are set aside in .torn files.
    """
    from millstream.writers.writer_facts import check_undecided, forget_writer

    home = invocation.home(needs_source=False)
    check_undecided(home, stream, name)
    confirm(f"Give up the undecided records of writer {name}? Its log must no longer be needed", yes=yes)
    upto, recovered = forget_writer(home, stream, name)
    what = f"recovered the records of {name}, because its log is here" if recovered else f"forgot {name}"
    note(f"{what}: linear readers may read up to {upto:,}")
