"""The documents name what exists: imports, attributes, paths, commands and flags."""

import argparse
import ast
import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import NamedTuple

from meshwright.cli.command_registry import COMMANDS
from meshwright.cli.parser import build_parser, join_words

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src"
PACKAGE = SOURCES / "meshwright"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in path.parts),
]
REPOSITORY_FOLDERS = {
    "benchmarks", "docs", "examples", "scripts", "src", "tests", "validation",
}  # fmt: skip
PACKAGE_FOLDERS = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
OTHER_PATHS = (
    "docs/_build*",  # made by `make docs`
    "timeline/profile*", "timeline/previous",  # in the folder of a run
    "mine/*",  # of a user, in examples
    "msccl/language/*",  # in the repository of msccl-tools
)  # fmt: skip
"""Paths that do not lie in the repository."""
METADATA_KEYS = {"meshwright.metadata", "meshwright.source", "meshwright.version"}
"""Dotted names that are no modules: keys in the metadata of a timeline file."""

FENCE = re.compile(r"^ *```(?P<kind>[^\n`]*)\n(?P<body>.*?)^ *```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"(?:[\w.*-]+/)+[\w.*-]*")
DOTTED = re.compile(r"meshwright(?:\.\w+)+")


class Block(NamedTuple):
    """A fenced block of a page."""

    place: str
    kind: str
    body: str


@cache
def read_page(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def list_blocks() -> Iterator[Block]:
    for path in PAGES:
        text = read_page(path)
        for found in FENCE.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            place = f"{path.relative_to(ROOT)}:{line}"
            yield Block(place, found["kind"].strip(), found["body"])


def list_inline_code() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of everything in backticks outside of fenced blocks."""
    for path in PAGES:
        text = FENCE.sub(lambda found: "\n" * found[0].count("\n"), read_page(path))
        for number, line in enumerate(text.splitlines(), 1):
            for code in CODE.findall(line):
                yield f"{path.relative_to(ROOT)}:{number}", code


# Imports and attributes


def find_module(name: str) -> Path | None:
    """Return the file of a module of the package or of a folder beside it."""
    home = SOURCES if name.partition(".")[0] == "meshwright" else ROOT
    stem = home.joinpath(*name.split("."))
    for path in (stem / "__init__.py", stem.with_suffix(".py")):
        if path.is_file():
            return path
    return None


@cache
def list_names(path: Path) -> frozenset[str]:
    """Return what a module offers: names that it binds, exports or loads lazily; submodules."""
    names: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        match node := nodes.pop():
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name.partition(".")[0] for alias in aliases}
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Dict(keys=keys):  # the table of names that load on first use
                names |= {str(key.value) for key in keys if isinstance(key, ast.Constant)}
            case _:
                nodes += ast.iter_child_nodes(node)
    if path.name == "__init__.py":
        names |= {each.stem for each in path.parent.iterdir()}
    return frozenset(names)


def is_ours(module: str) -> bool:
    return module.partition(".")[0] in {"meshwright", *REPOSITORY_FOLDERS}


def read_python(block: Block) -> ast.Module:
    lines = block.body.splitlines()
    if block.kind == "pycon":
        lines = [line[4:] for line in lines if line.startswith((">>>", "..."))]
    return ast.parse("\n".join(lines))


def list_imports(tree: ast.Module) -> Iterator[tuple[str, str | None, str]]:
    """Yield the modules of ours that are imported: module, name from it, the name in the code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if is_ours(alias.name):
                    yield alias.name, None, alias.asname or alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and is_ours(node.module):
            for alias in node.names:
                yield node.module, alias.name, alias.asname or alias.name


def check_imports(tree: ast.Module) -> Iterator[str]:
    """Yield imports that do not resolve, and attributes that imported modules do not have."""
    modules: dict[str, Path | None] = {}
    for module, name, here in list_imports(tree):
        home = find_module(module)
        if home is None:
            yield f"no module {module}"
        elif name is None:
            modules[here] = home
        else:
            modules[here] = find_module(f"{module}.{name}")
            if name not in list_names(home):
                yield f"{module} has no {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            path = modules.get(node.value.id)
            if path is not None and node.attr not in list_names(path):
                yield f"{node.value.id} has no {node.attr}"


def test_imports_of_examples_resolve() -> None:
    blocks = [block for block in list_blocks() if block.kind in ("python", "pycon")]
    assert len(blocks) > 50
    wrong = [
        f"{each.place}: {what}" for each in blocks for what in check_imports(read_python(each))
    ]
    assert wrong == []


def dotted_name_exists(name: str) -> bool:
    """Whether a module has that name, or a module has it among its names."""
    home, _, last = name.rpartition(".")
    path = find_module(home)
    return find_module(name) is not None or (path is not None and last in list_names(path))


def test_dotted_names_exist() -> None:
    found = [(place, code.removesuffix("()")) for place, code in list_inline_code()]
    names = [each for each in found if DOTTED.fullmatch(each[1]) and each[1] not in METADATA_KEYS]
    assert len(names) > 10
    assert [f"{place}: {name}" for place, name in names if not dotted_name_exists(name)] == []


# Paths


@cache
def list_paths() -> frozenset[str]:
    """Return all files and folders of the repository, relative to its root."""
    folders = [ROOT / name for name in sorted(REPOSITORY_FOLDERS)]
    return frozenset(
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (folder, *folder.rglob("*"))
    )


def path_exists(path: str) -> bool:
    """Whether a path lies in the repository, or in the package where its first folder does."""
    path = path.rstrip("/")
    if path.partition("/")[0] in REPOSITORY_FOLDERS:
        places = [path]
    elif path.partition("/")[0] in PACKAGE_FOLDERS:
        places = [f"src/meshwright/{path}", f"tests/{path}"]
    else:
        return any(each.endswith(f"/{path}") for each in list_paths())
    if any("*" in place for place in places):
        return any(fnmatch(each, place) for each in list_paths() for place in places)
    return any(place in list_paths() for place in places)


def names_a_path(code: str) -> bool:
    """Whether code in backticks is a path of the repository, and not one of other projects."""
    if not PATH.fullmatch(code) or any(fnmatch(code, other) for other in OTHER_PATHS):
        return False
    first = code.partition("/")[0]
    if first == "src":
        return code.startswith("src/meshwright")
    return first in REPOSITORY_FOLDERS | PACKAGE_FOLDERS or code.endswith(".py")


def test_paths_exist() -> None:
    found = [(place, code) for place, code in list_inline_code() if names_a_path(code)]
    assert len(found) > 100
    assert [f"{place}: {code}" for place, code in found if not path_exists(code)] == []


# Commands and flags


@cache
def get_parser(command: str) -> argparse.ArgumentParser:
    return list_verbs(build_parser(command, COMMANDS))[command]


def list_verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
    return found


def list_flags(parser: argparse.ArgumentParser) -> set[str]:
    return set(parser._option_string_actions)


def list_command_lines() -> Iterator[tuple[str, list[str]]]:
    """Yield the words after `mw` of every command line on a page."""
    for block in list_blocks():
        if block.kind.startswith("{mw}"):
            yield block.place, split_words(block.kind.removeprefix("{mw}"))
        elif not block.kind.startswith("{"):
            for line in block.body.replace("\\\n", " ").splitlines():
                if found := re.match(r"\s*(?:\$ )?(?:\w+=\S+ )*mw (.*)", line):
                    yield block.place, split_words(found[1])
    for place, code in list_inline_code():
        if code.startswith("mw "):
            yield place, split_words(code.removeprefix("mw "))


def split_words(line: str) -> list[str]:
    """Return the words up to the end of the command, or to the command line of a job."""
    words = []
    for word in shlex.split(line, comments=True):
        if word in ("|", ">", "<", "&&", "||", "&", ";", "--"):
            break
        words.append(word.removesuffix(";"))
    return words


def check_command_line(words: list[str]) -> Iterator[str]:
    """Yield the command, the verb and the long flags that nobody knows."""
    words = join_words(words, COMMANDS)
    while words and words[0] in ("--help", "--version"):
        words = words[1:]
    if not words or not re.match("[a-z]", words[0]):
        return  # a placeholder, such as COMMAND
    command, *rest = words
    if command not in COMMANDS:
        yield f"no command {command}"
        return
    parsers = [get_parser(command)]
    verbs = list_verbs(parsers[0])
    if verbs and rest and re.match("[a-z]", rest[0]):
        for verb in rest[0].split("|"):
            if verb in verbs:
                parsers.append(verbs[verb])
            elif not accepts_words(parsers[0]):
                yield f"mw {command} has no verb {verb}"
    known = set[str]().union(*map(list_flags, parsers))
    for word in rest:
        flag = word.partition("=")[0]
        if re.fullmatch(r"--[a-z][\w-]*", flag) and flag not in known:
            yield f"mw {command} has no {flag}"


def accepts_words(parser: argparse.ArgumentParser) -> bool:
    """Whether a command takes words of its own beside verbs."""
    return any(
        not action.option_strings and not isinstance(action, argparse._SubParsersAction)
        for action in parser._actions
    )


def test_commands_and_flags_exist() -> None:
    found = list(list_command_lines())
    assert len(found) > 300
    wrong = [f"{place}: {what}" for place, words in found for what in check_command_line(words)]
    assert wrong == []


def test_flags_on_pages_of_commands_exist() -> None:
    parsers = [get_parser(command) for command in COMMANDS]
    parsers += [verb for parser in parsers for verb in list_verbs(parser).values()]
    known = set[str]().union(*map(list_flags, parsers))
    found = [
        (place, flag)
        for place, code in list_inline_code()
        if place.startswith("docs/commands/") and code.startswith("--")
        for flag in re.findall(r"--[a-z][\w-]*", code)
    ]
    assert len(found) > 300
    assert [f"{place}: {flag}" for place, flag in found if flag not in known] == []
