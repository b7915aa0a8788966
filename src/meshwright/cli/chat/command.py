"""`mw chat`: talk to a model in the terminal, this machine's or one behind an OpenAI server."""

import argparse
import sys
from itertools import takewhile
from typing import TYPE_CHECKING

from meshwright.cli.flags.engine import (
    MODEL_HELP,
    add_adapter_choice,
    add_engine,
    read_adapter_choice,
    read_engine_config,
    require_serve_extra,
    resolve_model_path,
)
from meshwright.cli.flags.sampling import add_sampling, read_sampling_params
from meshwright.cli.parser import add_common
from meshwright.cli.render.safe_text import escape_lines
from meshwright.cli.result import CommandResult, NoteView
from meshwright.errors import InputError, Problem

if TYPE_CHECKING:
    from meshwright.run.serve.request import RequestOutput

EXAMPLES = (
    "mw chat",
    'mw chat path/of/model --system "Answer in one sentence."',
    'mw chat --message "What is the capital of France?" --temperature 0',
)

_ENDS = ("/bye", "/exit", "/quit")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw chat [MODEL] [flags]"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    parser.add_argument(
        "--message",
        action="append",
        default=[],
        metavar="TEXT",
        help="say this and end; may be given several times",
    )
    add_sampling(parser)
    add_engine(parser)
    add_adapter_choice(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Talk until there is nothing more to say; answer with the conversation."""
    with require_serve_extra():
        from meshwright.run.serve.llm import LLM

        if not args.message and not sys.stdin.isatty():
            lines = (line for line in sys.stdin.read().splitlines() if line.strip())
            args.message = list(takewhile(lambda line: line.strip() not in _ENDS, lines))
            if not args.message:
                fix = 'use --message "…", a terminal or a pipe'
                raise InputError([Problem("--message", "there is nothing to say", fix)])
        adapter = read_adapter_choice(args)
        sampling = read_sampling_params(args, max_tokens=512, temperature=0.7)
        shows = not (args.json or args.quiet)
        llm = LLM(resolve_model_path(args.model), read_engine_config(args))
        messages = [{"role": "system", "content": args.system}] if args.system else []
        said = 0
        while (text := _next(args.message, said)) is not None:
            said += 1
            messages.append({"role": "user", "content": text})
            found = llm.chat(messages, sampling, each=_show if shows else None, adapter=adapter)
            if shows:
                print(flush=True)
            messages.append({"role": "assistant", "content": found.text})
        quiet = tuple(each["content"] for each in messages if each["role"] == "assistant")
        views = (NoteView("end of the conversation"),) if not args.message else ()
        return CommandResult("chat/1", {"messages": messages}, views, quiet)


def _next(say: list[str], said: int) -> str | None:
    """Return what is said next; None at the end."""
    if say:
        return say[said] if said < len(say) else None
    try:
        text = input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)
        return None
    return None if text in _ENDS else text or _next(say, said)


def _show(piece: "RequestOutput") -> None:
    text = escape_lines(piece.text) if sys.stdout.isatty() else piece.text
    print(text, end="", flush=True)
