"""Check the prose of docstrings, comments, messages and documents. One line a breach, `file:line: what`; exit 1 if any.

- No sentence opens with Who, What, Whoever, Whose or Of, unless it is a question: a sentence names its actor.
- No word of `UNPLAIN`: each has a plain equivalent, which the message names.

    words.py [PATH…]

Code spans, code blocks and headings are not prose. Messages are the texts of more than one word in `src/millstream`.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
UNPLAIN: Final = {
    "anew": "again",
    "beside": "next to",
    "meanwhile": "while",
    "besides": "also",
    "any more": "no longer",
    "by itself": "alone, or on its own",
    "all that": "everything that",
    "but for": "except",
    "as yet": "so far",
    "nobody": "no one, or the actor's name",
    "somebody": "someone, or the actor's name",
}
OPENING: Final = re.compile(
    r"(?:\A|[.:;!?]\s+|\n[ \t]*\n\s*|\n[ \t]*[-*] )(Who|What|Whoever|Whose|Of)\b(?=[^?]*?(?:[.:;]|\Z|\n\s*\n))"
)
WORD: Final = re.compile(rf"\b({'|'.join(UNPLAIN)})\b", re.IGNORECASE)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each piece of prose in a file, with the number of its first line."""
    text = path.read_text()
    if path.suffix == ".md":
        yield (
            1,
            re.sub(
                r"^#.*$",
                "",
                re.sub(r"^(```|~~~).*?^\1", blank, text, flags=re.DOTALL | re.MULTILINE),
                flags=re.MULTILINE,
            ),
        )
        return
    comments: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, words = token.start[0], token.string.lstrip("#").strip()
            if comments and comments[-1][0] + comments[-1][1].count("\n") == line - 1:
                comments[-1] = (comments[-1][0], f"{comments[-1][1]}\n{words}")
            else:
                comments.append((line, words))
    yield from comments
    has_messages = "/src/millstream/" in path.as_posix()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
        elif has_messages and isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def blank(match: re.Match[str]) -> str:
    """Keep the lines of a block of code, without its text."""
    return "\n" * match[0].count("\n")


def breaches(path: Path) -> Iterator[str]:
    """Yield what a file's prose breaks."""
    for first, text in prose(path):
        plain = re.sub(r"`[^`\n]*`", "x", text)
        for pattern, why in ((OPENING, "a sentence opens with {!r}"), (WORD, "{!r}: write {}")):
            for found in pattern.finditer(plain):
                line = first + plain.count("\n", 0, found.start(1))
                yield f"{path}:{line}: {why.format(found[1], UNPLAIN.get(found[1].lower(), ''))}"


def main(arguments: list[str]) -> int:
    """Print every breach; 1 if there is one."""
    parser = argparse.ArgumentParser(description="Check the words of docstrings, comments and documents.")
    parser.add_argument("paths", nargs="*", help="files or folders; all tracked files if there are none")
    chosen = parser.parse_args(arguments)
    command = ["git", "ls-files", "-z", "--", *chosen.paths]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = 0
    for name in filter(None, listing.split("\0")):
        if Path(name).suffix in {".py", ".md"} and name != "scripts/words.py":
            for breach in breaches(ROOT / name):
                print(breach.removeprefix(f"{ROOT}/"))
                found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
