"""`mw serve MODEL`: answer over HTTP as OpenAI's API does, until a signal ends it."""

import argparse
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.cli.answer import Answer, Note
from meshwright.cli.engine_flags import (
    MODEL_HELP,
    adapters_of,
    add_engine,
    model_path,
    needs_serving,
    settings_of,
)
from meshwright.cli.parser import add_common
from meshwright.cli.serve_engines import add_engines, start_engines
from meshwright.errors import InputError, Problem
from meshwright.spec.units import format_some

if TYPE_CHECKING:
    from meshwright.run.serve.server import ServerSettings

EXAMPLES = (
    "mw serve path/of/model",
    "mw serve path/of/model --port 8080 --max-length 8192 --kv fp8",
    "mw serve path/of/model --replicas 8",
    "mw serve path/of/model --prefill 1 --decode 3",
    "MESHWRIGHT_API_KEYS=… mw serve path/of/model --host 0.0.0.0",
)
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw serve [MODEL] [flags]"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="where to listen (default 127.0.0.1)")
    group.add_argument("--port", default="8000", help="0 takes any free one (default 8000)")
    group.add_argument("--name", help="what clients call the model (default: its folder's name)")
    group.add_argument("--keys-file", metavar="FILE", help="API keys, beside MESHWRIGHT_API_KEYS")
    group.add_argument("--admin-keys-file", metavar="FILE", help="keys for sleep and new weights")
    group.add_argument("--admin", action="store_true", help="let everybody do that")
    group.add_argument("--waiting", metavar="N", help="requests that may wait (default 2048)")
    group.add_argument("--request-s", metavar="S", help="the longest request (default 600)")
    group.add_argument("--drain-s", metavar="S", help="to end what is under way (default 60)")
    group.add_argument("--origin", action="append", default=[], help="a web page that may call")
    group.add_argument("--reasoning", action="store_true", help="answers begin with <think>")
    group.add_argument(
        "--tool-format", metavar="NAME",
        help="how the model writes tool calls: hermes, llama3_json, mistral, pythonic,"
        " qwen3_coder (default: what its chat template looks like)",
    )  # fmt: skip
    group.add_argument(
        "--no-model-sampling", action="store_true",
        help="leave aside how generation_config.json would draw tokens",
    )  # fmt: skip
    group.add_argument("--no-access-log", action="store_true", help="no line for each request")
    add_engines(parser)
    add_engine(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Serve until a signal comes; answer with what was served."""
    with needs_serving(), ExitStack() as held:
        starting = held.enter_context(ExitStack())
        starting.enter_context(_ended_by_sigterm())
        from meshwright.run.serve.engine.start import check_start
        from meshwright.run.serve.model.words import load_words
        from meshwright.run.serve.server import run_server, serve_app
        from meshwright.run.serve.server.keys import read_keys
        from meshwright.run.serve.server.readers import Readers
        from meshwright.run.serve.server.running import take_address

        path = model_path(args.model)
        if args.random_weights:
            what = "random weights have no words, and a server needs some"
            raise InputError([Problem("--random-weights", what, "use mw generate --draw")])
        # What is wrong is told before minutes go by in which weights are read.
        check_start(path, settings_of(args))
        settings = _settings(args, path)
        keys = read_keys(settings.keys_file, "MESHWRIGHT_API_KEYS")
        read_keys(settings.admin_keys_file, "MESHWRIGHT_ADMIN_KEYS")
        sockets = [held.enter_context(one) for one in take_address(settings)]
        words = load_words(path)
        if not args.no_model_sampling:
            settings = msgspec.structs.replace(settings, sampling=words.sampling)
        Readers(words, settings.tool_format, reasoning=settings.reasoning)
        engine, lines = start_engines(args, path)
        if not len(keys) and settings.host not in _LOOPBACK:
            lines.append(f"whoever reaches {settings.host} may ask: there are no API keys")
        if not args.quiet:
            print(*lines, sep="\n", file=sys.stderr)
        app = serve_app(engine, words, settings)
        starting.close()

        def ready(url: str) -> None:
            print(f"serving {settings.model} at {url}/v1", file=sys.stderr, flush=True)

        run_server(app, settings, started=ready, sockets=sockets)
    gauges = engine.gauges()
    data = {
        "model": settings.model,
        "prompt_tokens": gauges.prompt_tokens,
        "output_tokens": gauges.output_tokens,
        "steps": gauges.steps,
    }
    read, written = gauges.prompt_tokens, gauges.output_tokens
    text = f"served {format_some(read, 'token')} of prompts and {written:,} of answers"
    return Answer("serve/1", data, (Note(text),))


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end what does not serve yet, as Ctrl-C does.

    To the first process of a container it does nothing unless somebody listens, and weights take
    minutes to read.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _settings(args: argparse.Namespace, path: Path) -> "ServerSettings":
    from meshwright.run.serve.server import ServerSettings

    given: dict[str, Any] = {}
    for name, kind in (("port", int), ("waiting", int), ("request_s", float), ("drain_s", float)):
        text = getattr(args, name)
        if text is not None:
            given[name] = _number(name, text, kind)
    for name in ("keys_file", "admin_keys_file"):
        if getattr(args, name) is not None:
            given[name] = Path(getattr(args, name))
    return ServerSettings(
        model=args.name or (path.stem if path.is_file() else path.resolve().name),
        host=args.host,
        origins=tuple(args.origin),
        adapters=tuple(adapters_of(args)),
        admin=args.admin,
        reasoning=args.reasoning,
        tool_format=args.tool_format,
        access_log=not args.no_access_log,
        **given,
    )


def _number(name: str, text: str, kind: type[float] | type[int]) -> float:
    try:
        return kind(text)
    except ValueError:
        flag = f"--{name.replace('_', '-')}"
        raise InputError([Problem(flag, f"{text!r} is no number", "use 60, say")]) from None
