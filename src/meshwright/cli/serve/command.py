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

from meshwright.cli.flags.engine import (
    MODEL_HELP,
    add_engine,
    parse_adapters,
    read_engine_config,
    require_serve_extra,
    resolve_model_path,
)
from meshwright.cli.flags.problems import declare_flag_names
from meshwright.cli.parser import add_common
from meshwright.cli.render.safe_text import print_to_stderr
from meshwright.cli.result import CommandResult, NoteView
from meshwright.cli.serve.engines import add_engines, start_engines
from meshwright.errors import InputError, Problem
from meshwright.http_pages.allowed_hosts import (
    ALLOWED_HOSTS_HELP,
    is_loopback_name,
    make_allowed_hosts,
    split_names,
)
from meshwright.spec.units import format_quantity

if TYPE_CHECKING:
    from meshwright.run.serve.server import ServerConfig

EXAMPLES = (
    "mw serve path/of/model",
    "mw serve path/of/model --port 8080 --max-model-len 8192 --kv-cache-dtype fp8",
    "mw serve path/of/model --replicas 8",
    "mw serve path/of/model --prefill-replicas 1 --decode-replicas 3",
    "MESHWRIGHT_API_KEY=… mw serve path/of/model --host 0.0.0.0",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw serve [MODEL] [flags]"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="where to listen (default 127.0.0.1)")
    group.add_argument("--port", default="8000", help="0 takes any free one (default 8000)")
    group.add_argument(
        "--served-model-name", metavar="NAME",
        help="what clients call the model (default: its folder's name)",
    )  # fmt: skip
    group.add_argument(
        "--api-key-file", metavar="FILE", help="API keys, besides those of MESHWRIGHT_API_KEY"
    )
    group.add_argument(
        "--admin-api-key-file", metavar="FILE", help="keys for sleep and weight updates"
    )
    group.add_argument(
        "--allow-unauthenticated-admin", action="store_true",
        help="let every client do that where there is no admin key",
    )  # fmt: skip
    group.add_argument(
        "--max-queued-requests", metavar="N", help="requests that may wait (default 2048)"
    )
    group.add_argument(
        "--request-timeout", metavar="S", help="seconds of the longest request (default 600)"
    )
    group.add_argument(
        "--shutdown-timeout", metavar="S",
        help="seconds for open requests after the signal to stop (default 60)",
    )  # fmt: skip
    group.add_argument(
        "--allowed-origins", action="append", default=[], metavar="ORIGIN",
        help="a web page that may call",
    )  # fmt: skip
    group.add_argument(
        "--allowed-hosts", metavar="NAMES", help=ALLOWED_HOSTS_HELP,
    )  # fmt: skip
    group.add_argument(
        "--reasoning-parser", choices=("think",), metavar="NAME",
        help="how the model writes its reasoning: think (answers begin with <think>)",
    )  # fmt: skip
    group.add_argument(
        "--tool-call-parser", metavar="NAME",
        help="how the model writes tool calls: hermes, llama3_json, mistral, pythonic,"
        " qwen3_coder (default: what its chat template looks like)",
    )  # fmt: skip
    group.add_argument(
        "--no-generation-config", action="store_true",
        help="ignore the sampling parameters of generation_config.json",
    )  # fmt: skip
    group.add_argument("--no-access-log", action="store_true", help="no line for each request")
    add_engines(parser)
    add_engine(parser)
    declare_flag_names(
        parser,
        lora_names="--lora-modules",
        request_timeout_s="--request-timeout",
        shutdown_timeout_s="--shutdown-timeout",
    )
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Serve until a signal comes; answer with what was served."""
    with require_serve_extra(), ExitStack() as held:
        starting = held.enter_context(ExitStack())
        starting.enter_context(_ended_by_sigterm())
        from meshwright.run.serve.engine.startup import validate_engine_config
        from meshwright.run.serve.server import create_app, run_server
        from meshwright.run.serve.server.api_keys import read_api_keys
        from meshwright.run.serve.server.http_server import bind_socket
        from meshwright.run.serve.server.input_processing.process_processor import (
            ProcessInputProcessor,
        )
        from meshwright.run.serve.server.protocol.output_parsers import OutputParserFactory
        from meshwright.run.serve.tokenizer.tokenizer import load_tokenizer

        path = resolve_model_path(args.model)
        if args.load_format == "dummy":
            what = "dummy weights have no tokenizer, and a server needs one"
            fix = "use mw generate --num-prompts"
            raise InputError([Problem("--load-format", what, fix)])
        # Validate before loading weights, which takes minutes.
        validate_engine_config(path, read_engine_config(args))
        settings = _settings(args, path)
        keys = read_api_keys(settings.api_key_file, "MESHWRIGHT_API_KEY")
        read_api_keys(settings.admin_api_key_file, "MESHWRIGHT_ADMIN_API_KEY")
        sockets = [held.enter_context(one) for one in bind_socket(settings)]
        words = load_tokenizer(path)
        if not args.no_generation_config:
            settings = msgspec.structs.replace(
                settings, default_sampling_params=words.default_sampling_params
            )
        OutputParserFactory(words, settings.tool_call_parser, reasoning=settings.parse_reasoning)
        # It reads the tokenizer while the engine reads its weights.
        processor = None
        if sys.platform != "win32":
            processor = ProcessInputProcessor(path, settings)
            held.callback(processor.kill)
        engine, lines = start_engines(args, path)
        if not len(keys) and not is_loopback_name(settings.host):
            lines.append(f"whoever reaches {settings.host} may ask: there are no API keys")
        if not args.quiet:
            print_to_stderr(*lines)
        app = create_app(engine, words, settings, input_processor=processor)
        starting.close()

        def ready(url: str) -> None:
            print_to_stderr(f"serving {settings.model} at {url}/v1")

        run_server(app, settings, started=ready, sockets=sockets)
    gauges = engine.stats()
    data = {
        "model": settings.model,
        "prompt_tokens": gauges.prompt_tokens,
        "output_tokens": gauges.output_tokens,
        "steps": gauges.steps,
    }
    read, written = gauges.prompt_tokens, gauges.output_tokens
    text = f"served {format_quantity(read, 'token')} of prompts and {written:,} of answers"
    return CommandResult("serve/1", data, (NoteView(text),))


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


def _settings(args: argparse.Namespace, path: Path) -> "ServerConfig":
    from meshwright.run.serve.server import ServerConfig

    given: dict[str, Any] = {}
    for name, field, kind in (
        ("port", "port", int),
        ("max_queued_requests", "max_queued_requests", int),
        ("request_timeout", "request_timeout_s", float),
        ("shutdown_timeout", "shutdown_timeout_s", float),
    ):
        text = getattr(args, name)
        if text is not None:
            given[field] = _number(name, text, kind)
    for name in ("api_key_file", "admin_api_key_file"):
        if getattr(args, name) is not None:
            given[name] = Path(getattr(args, name))
    hosts = split_names(args.allowed_hosts)
    make_allowed_hosts(hosts, args.host)  # refuses bad names before anything starts
    return ServerConfig(
        model=args.served_model_name or (path.stem if path.is_file() else path.resolve().name),
        host=args.host,
        allowed_hosts=hosts,
        allowed_origins=tuple(args.allowed_origins),
        lora_names=tuple(parse_adapters(args)),
        allow_unauthenticated_admin=args.allow_unauthenticated_admin,
        parse_reasoning=args.reasoning_parser is not None,
        tool_call_parser=args.tool_call_parser,
        access_log=not args.no_access_log,
        **given,
    )


def _number(name: str, text: str, kind: type[float] | type[int]) -> float:
    try:
        return kind(text)
    except ValueError:
        flag = f"--{name.replace('_', '-')}"
        raise InputError([Problem(flag, f"{text!r} is no number", "use 60, say")]) from None
