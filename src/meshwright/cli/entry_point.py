"""`main`: parse, run, print, and turn every ending into an exit code."""

import io
import os
import sys
from argparse import Namespace
from collections.abc import Sequence

from meshwright.cli.command_registry import COMMANDS
from meshwright.cli.parser import Parser, build_parser, join_words
from meshwright.cli.render.terminal import disable_color, print_error, print_result
from meshwright.cli.result import CommandResult
from meshwright.errors import InputError, MeshwrightError, MissingDependency

INTERRUPTED_EXIT_CODE = 130
INTERNAL_ERROR_EXIT_CODE = 70


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words, job = _without_job(join_words(sys.argv[1:] if argv is None else argv, COMMANDS))
    mode = _mode(words)
    _print_anything()
    try:
        return _run(words, mode, job)
    except MeshwrightError as error:
        print_error(error, mode)
        return error.exit_code
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("meshwright"):
            raise
        missing = MissingDependency(
            f"the package {error.name} is not installed", "install meshwright with its dependencies"
        )
        print_error(missing, mode)
        return missing.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:
        # The reader (head, less) has gone; there is no one left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if "--debug" in words:
            raise
        if _ran_out(error):
            what = f"there is not enough memory for this ({_first_line(error)})"
            fix = "ask for fewer tokens or requests at a time, or spread it over more devices"
            lacking = MissingDependency(what, fix)
            print_error(lacking, mode)
            return lacking.exit_code
        return _own_fault(error)


def run_command(words: Sequence[str]) -> CommandResult:
    """Return what a command answers without printing it; raise where its words are wrong."""
    words = join_words(words, COMMANDS)
    args = _parse(build_parser(words[0], COMMANDS), words)
    assert args is not None, "help is printed, not answered"
    return COMMANDS[words[0]].load().run(args)


def _print_anything() -> None:
    """Let a terminal without Unicode show question marks rather than fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _without_job(words: list[str]) -> tuple[list[str], list[str]]:
    """Our own words, and after `--` those of the job that a command starts."""
    chosen = next((word for word in words if not word.startswith("-")), None)
    command = COMMANDS.get(chosen or "")
    if command is None or not command.takes_job_command or "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _run(words: list[str], mode: str, job: list[str]) -> int:
    chosen = next((word for word in words if not word.startswith("-")), None)
    parser = build_parser(chosen if chosen in COMMANDS else None, COMMANDS)
    args = _parse(parser, words)
    if args is None:
        return 0
    if args.version:
        from meshwright import __version__

        sys.stdout.write(f"meshwright {__version__}\n")
        return 0
    if args.command is None:
        parser.print_help()
        return 0
    if getattr(args, "no_color", False):
        disable_color()
    if COMMANDS[args.command].takes_job_command:
        args.job = job
    try:
        answer = COMMANDS[args.command].load().run(args)
    except InputError as error:
        # It loads the specs, which help does without.
        from meshwright.cli.flags.problems import rename_fields_to_flags

        rename_fields_to_flags(error, _leaf(parser, args), args)
        raise
    print_result(answer, mode)
    sys.stdout.flush()
    return answer.exit_code


def _parse(parser: Parser, words: list[str]) -> Namespace | None:
    """Parse the words; None means that help was asked for and printed."""
    try:
        args, rest = parser.parse_known_args(words)
    except SystemExit:
        return None
    if hasattr(args, "files") and not any(word.startswith("-") for word in rest):
        # argparse stops at the first flag after a list of words; the rest belongs to it too.
        args.files, rest = [*args.files, *rest], []
    if rest:
        leaf = _leaf(parser, args)
        leaf.error(f"unrecognized arguments: {' '.join(rest)}")
    return args


def _leaf(parser: Parser, args: Namespace) -> Parser:
    """Return the parser of the command and verb that were given, which knows their flags."""
    for word in (getattr(args, "command", None), getattr(args, "verb", None)):
        for action in parser._actions:  # noqa: SLF001 - argparse has no public list
            choices = getattr(action, "choices", None)
            if isinstance(choices, dict) and word in choices:
                parser = choices[word]
    return parser


def _mode(words: list[str]) -> str:
    if "--json" in words:
        return "json"
    return "quiet" if {"-q", "--quiet"} & set(words) else "auto"


def _ran_out(error: Exception) -> bool:
    """Say whether a machine or a GPU had no memory left; torch has no one error for that."""
    named = type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)
    return named or "can't allocate memory" in str(error)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def _own_fault(error: Exception) -> int:
    """Keep the traceback in a file and say where: this is our bug, not the user's."""
    import tempfile
    import traceback

    from meshwright.cli.render.safe_text import print_to_stderr

    with tempfile.NamedTemporaryFile(
        "w", prefix="meshwright-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        traceback.print_exception(error, file=file)
    print_to_stderr(
        f"error: meshwright failed ({type(error).__name__}: {error}); this is a bug",
        f"  hint: please report it with {file.name} and the output of mw doctor",
    )
    return INTERNAL_ERROR_EXIT_CODE
