"""Rules of this repository that no linter has. One line a breach, `file:line: what`; exit 1 if there is one.

- A module of `src` or of an application's `src` has at most 600 lines: past that it is two modules. The modules of one folder
  have at most 6,000 together: past that it gets rooms of its own.
- An application under `apps` imports only what is public in `millstream`, as `millstream.__doc__` lists it.
- No marks of unfinished work, and no function that does nothing.
- Addresses: only hosts that are named here. Packages and jars are found by their clients' own defaults and the
  user's mirrors, so no registry's address belongs into a file.
- No path that exists on one developer's machine only.
- `src` starts a thread only as a `Worker`, and replaces a file only by `replacing`: each has one home.
- No module of a package imports from the package itself, if that imports its modules: two threads that import both at once
  would end with "partially initialized module".
- A dotted name in a docstring of `src`, such as `wal.reader` or `router.plan`, is one of a module, or of a name that it has.
- Every room that must stay pure is named in import-linter's contract once it exists.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINES_MAX = 600
FOLDER_LINES_MAX = 6_000
PURE_ROOMS = ("errors", "model", "codec", "protocol", "crdt")

ONE_HOME = {
    "threading.Thread": ("millstream.workers.Worker", {"workers.py"}),
    "threading.Timer": ("millstream.workers.Worker", {"workers.py"}),
    "os.fsync": ("millstream.private_files.replacing or sync_folder", {"private_files.py"}),
    "os.rename": ("millstream.private_files.replacing", {"private_files.py", "wal/files.py"}),
    "os.replace": ("millstream.private_files.replacing", {"private_files.py", "wal/files.py"}),
}
"""Names of the standard library that `src` uses in one place only, each with its replacement and the modules that may use it."""

PUBLIC_MODULES = {"millstream.aio", "millstream.crdt", "millstream.errors", "millstream.testing"}
PUBLIC_NAMES = set(
    re.findall(r'^    "(\w+)": \("millstream', (ROOT / "src/millstream/__init__.py").read_text(), re.MULTILINE)
)

UNFINISHED = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3]) + r")\b")
MACHINE_PATH = re.compile(r"(?<![\w.~{}/-])/(?:root|work|home|Users)/[\w.-]+")
ADDRESS = re.compile(r"\b(?:https?|ftp)://(?:[^/\s@]*@)?([\w.-]+)")
HOSTS = {
    "169.254.169.254",  # where a machine in a cloud asks for its own role
    "127.0.0.1",
    "localhost",
    "0.0.0.0",  # noqa: S104 - the text, not a socket
    # documents that pages and licences refer to
    "arrow.apache.org",
    "datatracker.ietf.org",
    "docs.delta.io",
    "github.com",
    "iceberg.apache.org",
    "keepachangelog.com",
    "semver.org",
    "spark.apache.org",
    "www.apache.org",
    "www.postgresql.org",
    "www.w3.org",
}
DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
DOTTED = re.compile(r"`(?:millstream\.)?([a-z_]\w*(?:\.\w+)+)(?:\(\))?`")
FOREIGN = {
    *("df", "home", "ops"),  # variables in examples
    *("public", "public_changes", "pg_class"),  # PostgreSQL's schemas and tables
    *(
        "max",
        "min",
        "retention.ms",
        "sasl",
        "security",
        "spark.driver.extraJavaOptions",
        "topic",
    ),  # settings of Kafka and Spark
    *("alembic.ini", "pg_hba.conf", "sessions.state", "streams", "tags"),  # files, and keys of files
}
"""Dotted names in docstrings, or their first words, that aren't names of Python modules."""
EXAMPLE_DOMAINS = (".example", "example.com", "example.org", ".invalid", ".test")


def tracked_text() -> Iterator[tuple[Path, str]]:
    """Yield every tracked text file that is there, with its content."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listing.split("\0")):
        path = ROOT / name
        if path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            if b"\0" not in data:
                yield path.relative_to(ROOT), data.decode("utf-8", errors="replace")


def line_breaches(path: Path, text: str) -> Iterator[str]:
    """Yield the breaches of single lines."""
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path}:{number}"
        if UNFINISHED.search(line):
            yield f"{where}: a mark of unfinished work; finish it, or open an issue"
        for found in MACHINE_PATH.finditer(line):
            yield f"{where}: {found[0]} is a path of one machine"
        for found in ADDRESS.finditer(line):
            host = found[1].lower()
            if host not in HOSTS and not host.endswith(EXAMPLE_DOMAINS) and "." in host:
                yield f"{where}: {host} is not among the hosts of scripts/house_rules.py"


def module_breaches(path: Path, text: str) -> Iterator[str]:
    """Yield the breaches of a Python module as a whole."""
    lines = text.count("\n")
    if "src" in path.parts[:3] and lines > LINES_MAX:
        yield f"{path}:1: {lines} lines; past {LINES_MAX} it is two modules"
    tree = ast.parse(text)
    if path.parts[0] == "apps":
        yield from private_imports(path, tree)
    if path.parts[:2] == ("src", "millstream"):
        yield from one_home_breaches(path, tree)
        yield from own_package_imports(path, tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = [part for part in node.body if not is_docstring(part)]
            if body and all(isinstance(part, ast.Pass) for part in body):
                yield f"{path}:{node.lineno}: {node.name}() does nothing"


def private_imports(path: Path, tree: ast.Module) -> Iterator[str]:
    """Yield the imports of an application that aren't public: submodules other than PUBLIC_MODULES, or private names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [str(node.module)]
            if node.module == "millstream":
                modules += [f"millstream.{alias.name}" for alias in node.names if alias.name not in PUBLIC_NAMES]
        else:
            continue
        for name in modules:
            if name.startswith("millstream.") and name not in PUBLIC_MODULES:
                yield f"{path}:{node.lineno}: {name} isn't public; an application imports what docs/reference lists"


def one_home_breaches(path: Path, tree: ast.Module) -> Iterator[str]:
    """Yield the uses of what has one home elsewhere: by its module, or imported from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            instead, homes = ONE_HOME.get(name, ("", set()))
            if instead and path.relative_to("src/millstream").as_posix() not in homes:
                yield f"{path}:{node.lineno}: {name}; use {instead}"


def own_package_imports(path: Path, tree: ast.Module) -> Iterator[str]:
    """Yield a module's imports from a package around it whose `__init__` imports modules of that package."""
    packages = [
        ".".join(folder.relative_to("src").parts)
        for folder in path.parents
        if folder.is_relative_to("src/millstream") and (ROOT / folder / "__init__.py").exists()
    ]
    for node in tree.body if path.name != "__init__.py" else ():
        if isinstance(node, ast.ImportFrom) and node.module in packages:
            init = (ROOT / "src" / Path(*node.module.split(".")) / "__init__.py").read_text()
            if re.search(rf"^from {re.escape(node.module)}[. ]", init, re.MULTILINE):
                yield f"{path}:{node.lineno}: from {node.module} import …; import the module itself"


def is_docstring(node: ast.stmt) -> bool:
    """Return whether a statement is text alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def stale_names(sources: dict[Path, str]) -> Iterator[str]:
    """Yield the dotted names in docstrings whose module, or whose name in it, isn't there: it may have been renamed."""
    homes: dict[str, set[Path]] = {}
    for path in sources:
        for home in (path, *path.parents):
            homes.setdefault(home.stem, set()).add(home)
    known = {home for group in homes.values() for home in group}
    defined = set(re.findall(r"\b(?:class|def|import|as) (\w+)", "\n".join(sources.values())))

    def is_there(first: str, *rest: str) -> bool:
        places = homes.get(first, set())
        for part in rest if places else ():
            inner = {child for place in places for child in (place / part, place / f"{part}.py") if child in known}
            if not inner:
                texts = (text for path, text in sources.items() if not places.isdisjoint((path, path.parent)))
                return any(re.search(rf"\b{part}\b", text) for text in texts)
            places = inner
        return bool(places) or first in defined

    for path, text in sources.items():
        for docstring in DOCSTRING.finditer(text):
            for found in DOTTED.finditer(docstring[1]):
                parts = found[1].split(".")
                if found[1] not in FOREIGN and parts[0] not in FOREIGN and not is_there(*parts):
                    line = text.count("\n", 0, docstring.start(1) + found.start()) + 1
                    yield f"{path}:{line}: {found[1]} isn't there; name the module that has it now"


def contract_breaches() -> Iterator[str]:
    """Yield the rooms that should be under the contract of purity and are not."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    pure = next(contract for contract in contracts if contract["id"] == "pure")
    for room in PURE_ROOMS:
        stands = any((ROOT / "src" / "millstream" / name).exists() for name in (f"{room}.py", f"{room}/__init__.py"))
        if stands and f"millstream.{room}" not in pure["source_modules"]:
            yield f"pyproject.toml:1: millstream.{room} is missing from the import contract 'pure'"


def folder_breaches() -> Iterator[str]:
    """Yield the folders that need rooms of their own."""
    for folder in sorted({path.parent for home in (".", "apps/*") for path in ROOT.glob(f"{home}/src/**/*.py")}):
        lines = sum(path.read_text().count("\n") for path in folder.glob("*.py"))
        if lines > FOLDER_LINES_MAX:
            yield f"{folder.relative_to(ROOT)}:1: {lines} lines in its modules; past {FOLDER_LINES_MAX} it gets rooms of its own"


def main() -> int:
    """Print every breach; 1 if there is one."""
    breaches = [*contract_breaches(), *folder_breaches()]
    sources = {}
    for path, text in tracked_text():
        breaches += line_breaches(path, text)
        if path.suffix == ".py":
            breaches += module_breaches(path, text)
            if path.is_relative_to("src/millstream"):
                sources[path.relative_to("src/millstream")] = text
    breaches += stale_names(sources)
    print("\n".join(breaches), end="\n" if breaches else "")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
