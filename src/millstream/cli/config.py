"""`config show`: the configuration as it is read, with the origin of each value and without secrets."""

from __future__ import annotations

import json
from typing import Any

import click

from millstream.cli.context import (
    Invocation,
    SuggestingGroup,
    json_option,
    note,
    pass_invocation,
    print_json,
    say,
)


@click.group(cls=SuggestingGroup)
def config() -> None:
    """Show the configuration."""


@config.command("show")
@json_option
@pass_invocation
def config_show(invocation: Invocation, as_json: bool) -> None:
    """Print the effective configuration, secrets masked, with the origin of each value."""
    loaded = invocation.home(needs_source=False).loaded_config
    if as_json:
        from millstream.config.validation import key_text

        print_json([{"key": key_text(p), "value": v, "origin": o} for p, v, o in loaded.effective()])
        return
    from millstream.config.validation import key_text

    sections: dict[tuple[Any, ...], list[str]] = {}
    for path, value, origin in loaded.effective():
        # TOML allows a section only once, and its keys are split if tables stand between them.
        text = "{}" if value == {} else json.dumps(value, ensure_ascii=False)
        line = f"{key_text(path[-1:])} = {text}" if value is not None else f"# {key_text(path[-1:])} is not set"
        sections.setdefault(path[:-1], []).append(f"{line:<60}  # {origin}")
    for number, (section, lines) in enumerate(sections.items()):
        if number:
            say()
        if section and isinstance(section[-1], int):  # one of an array of tables
            say(f"[[{key_text(section[:-1])}]]", bold=True)
        elif section:
            say(f"[{key_text(section)}]", bold=True)
        for line in lines:
            say(line)
    for stream in loaded.config.streams:
        for name, error in loaded.unset_consumers(stream).items():
            note(f"consumer {name} isn't shown: {error.message}")
