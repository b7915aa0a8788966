"""`mw completion bash|zsh|fish`: a small script that asks `mw` itself for the next word."""

import argparse
from collections.abc import Callable, Mapping

from meshwright.cli.command_entry import CommandEntry
from meshwright.cli.parser import Parser, add_common, build_parser, join_words
from meshwright.cli.result import CommandResult, TextView
from meshwright.errors import InputError

EXAMPLES = (
    'eval "$(mw completion bash)"',
    "mw completion fish > ~/.config/fish/completions/mw.fish",
)

_SCRIPTS = {
    "bash": """_mw() {
  local IFS=$'\\n'
  COMPREPLY=($(mw completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _mw mw meshwright
""",
    "zsh": """#compdef mw meshwright
_mw() {
  local -a found
  found=("${(@f)$(mw completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  compadd -- $found || _files
}
compdef _mw mw meshwright
""",
    "fish": """function __mw_words
  set -l words (commandline -opc) (commandline -ct)
  mw completion words -- $words[2..-1] 2>/dev/null
end
complete -c mw -f -a '(__mw_words)'
complete -c meshwright -f -a '(__mw_words)'
""",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "shell", choices=(*_SCRIPTS, "words"), metavar="SHELL", help=f"one of {', '.join(_SCRIPTS)}"
    )
    parser.add_argument("typed", nargs="*", help=argparse.SUPPRESS)
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with the script, or with the words that may follow."""
    if args.shell != "words":
        body = _SCRIPTS[args.shell]
        return CommandResult(
            "completion/1", {"script": body}, (TextView(body, verbatim=True),), (body.strip(),)
        )
    words = complete_words(args.typed, args.command_table)
    text = "\n".join(words)
    return CommandResult(
        "completion/1", {"words": words}, (TextView(text),) if words else (), tuple(words)
    )


def complete_words(typed: list[str], command_table: Mapping[str, CommandEntry]) -> list[str]:
    """Return the words that may stand where the last of `typed` is being written."""
    *before, start = typed or [""]
    before = join_words(before, command_table)
    parser: argparse.ArgumentParser = build_parser(
        before[0] if before and before[0] in command_table else None, command_table
    )
    for word in before:
        parser = _choices(parser).get(word, parser)
    previous = before[-1] if before else ""
    actions = parser._option_string_actions  # noqa: SLF001 - argparse has no public list
    value_of = actions.get(previous)
    if value_of is not None and value_of.nargs != 0:
        candidates = _values(value_of)
    elif start.startswith("-"):
        candidates = [flag for flag in actions if flag.startswith("--")]
    else:
        second = [
            pair[1] for pair in map(str.split, command_table) if [pair[0]] == before and pair[1:]
        ]
        candidates = [*(word for word in _choices(parser) if " " not in word), *second]
        candidates += _names(parser)
    return sorted(word for word in candidates if word.startswith(start))


def _choices(parser: argparse.ArgumentParser) -> dict[str, Parser]:
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list
        if isinstance(action.choices, dict):
            return action.choices
    return {}


def _names(parser: argparse.ArgumentParser) -> list[str]:
    words = parser.prog.split()
    return _catalog(words[1]) if len(words) == 2 else []


def _values(action: argparse.Action) -> list[str]:
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    if action.dest in {"to", "source"}:
        from meshwright.spec import bridge

        return list(bridge.BRIDGES)
    if action.dest in {"model", "cluster"}:
        return _catalog(f"{action.dest}s")
    return _literals(action.dest)


def _literals(destination: str) -> list[str]:
    """Return the words a layout field allows."""
    from meshwright.spec.layout.choices import CHOICES

    return sorted(CHOICES.get(destination.removeprefix("layout."), ()))


def _catalog(kind: str) -> list[str]:
    from meshwright.spec import catalog

    lists: dict[str, Callable[[], dict[str, object]]] = {
        "models": lambda: dict(catalog.list_models()),
        "gpus": lambda: dict(catalog.list_gpus()),
        "clusters": lambda: dict(catalog.list_clusters()),
    }
    try:
        return list(lists[kind]()) if kind in lists else []
    except InputError:
        return []
