"""`mw bench serve URL`: what an OpenAI-compatible server does under load; two results compared."""

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from meshwright.cli.answer import Answer
from meshwright.cli.bench_serve_plot import plot_problems, write_plot
from meshwright.cli.bench_serve_screen import answer_of, compared_answer
from meshwright.cli.parser import Parser, add_common
from meshwright.cli.request_flags import add_request_flags, seed_of, streams_of
from meshwright.errors import InputError, MissingPart, Problem
from meshwright.observe.bench.serving.echo import Echo, compare_runs
from meshwright.observe.bench.serving.figures import parse_objective
from meshwright.observe.bench.serving.measure import Settings, Turn, measure
from meshwright.observe.bench.serving.result import Result, Run, load, save
from meshwright.observe.bench.serving.served import Served
from meshwright.observe.bench.serving.server import base_of
from meshwright.observe.bench.serving.spans import timeline_problems, write_timeline
from meshwright.observe.bench.serving.wire import Asking
from meshwright.predict.serving.latency import Objective
from meshwright.spec.bounds import real, require, whole
from meshwright.spec.units import format_some, parse_count, parse_number, parse_seconds

SUMMARY = "put load on an OpenAI-compatible server and time every token"
EXAMPLES = (
    "mw bench serve http://127.0.0.1:8000 --concurrency 64 --requests 500",
    "mw bench serve URL --rate 1,2,4,8 --slo ttft=500ms,itl=50ms --save a.json --plot a.svg",
    "mw bench serve URL --trace requests.jsonl --speed 2",
    "mw bench serve --compare a.json b.json",
)

_READ_WITH = {"compare": ("plot",), "show": ("slo", "save", "timeline", "plot")}
"""What may be given beside results that are there."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw bench serve URL [flags] | mw bench serve --compare A.json B.json"
    parser.add_argument("url", nargs="?", metavar="URL", help="the server, with or without /v1")
    parser.add_argument("--model", metavar="NAME", help="which model (default: the server's first)")
    parser.add_argument(
        "--api", choices=("completions", "chat"), default="completions",
        help="completions of tokens (default), or chats, whose prompts are texts",
    )  # fmt: skip
    parser.add_argument(
        "--text", action="store_true", help="send texts also to completions, for prompts of words"
    )
    parser.add_argument(
        "--vocabulary", default="10000", metavar="N",
        help="draw tokens of prompts below N (default: 10000)",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", default="0", metavar="T", help="of sampling (default: 0, the likeliest)"
    )
    parser.add_argument(
        "--natural-ends", action="store_true",
        help="let answers end where the model ends them, not at the length asked for",
    )  # fmt: skip
    parser.add_argument(
        "--plain", action="store_true", help="send only fields that OpenAI's own API knows"
    )
    parser.add_argument("--extra", metavar="JSON", help="more fields for every request's body")
    parser.add_argument(
        "--key-env", metavar="NAME", help="environment variable that holds the server's API key"
    )
    add_request_flags(parser)
    parser.add_argument(
        "--ramp", default="0", metavar="TIME", help="grow to the full load; not counted"
    )
    parser.add_argument(
        "--warm-up", default="8", metavar="N", help="requests sent before all (default: 8)"
    )
    parser.add_argument(
        "--timeout", default="600s", metavar="TIME", help="of one request (default: 600s)"
    )
    judged = parser.add_argument_group("what is made of it")
    judged.add_argument("--slo", metavar="NAME=TIME,…", help="goodput: ttft, itl, tpot, e2e")
    judged.add_argument("--save", metavar="FILE", help="keep every token's time, as JSON")
    judged.add_argument("--timeline", metavar="DIR", help="keep it as a timeline, for mw timeline")
    judged.add_argument("--plot", metavar="FILE", help="draw it, as SVG")
    judged.add_argument("--show", metavar="FILE", help="show a result again and ask no server")
    judged.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), help="two results, and what is beyond noise"
    )
    judged.add_argument(
        "--check-echo", action="store_true",
        help="ask everything again one at a time; exit with 1 where a token differs",
    )  # fmt: skip
    judged.add_argument(
        "--check", metavar="FILE", help="answers have to be those of an earlier result, likewise"
    )
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with what was measured, is shown, or compared."""
    _refuse_unread(args)
    objective = None if args.slo is None else parse_objective(args.slo, "--slo")
    if args.compare is not None:
        first, second = map(load, args.compare)
        if args.plot:
            write_plot(args.plot, _named(args.compare, (first, second)))
        return compared_answer(args.compare, first, second)
    if args.show is not None:
        shown = load(args.show)
        return _kept(args, shown, objective or _objective_of(shown))
    if args.url is None:
        fix = "mw bench serve http://127.0.0.1:8000"
        raise InputError([Problem("URL", "which server is to be asked?", fix)])
    before = load(args.check) if args.check else None
    settings = _settings(args, before)
    _refuse_lost_work(args)
    streams = [Turn(*stream) for stream in streams_of(args)]
    if before is not None:
        _refuse_other_prompts(args, before, streams)
    with _Watching(quiet=args.quiet or args.json) as watching:
        measured = measure(settings, streams, command_of(args), watching.show)
    echo = measured.echo
    if before is not None:
        echo = compare_runs(measured.result.runs, before.runs)
    return _kept(args, measured.result, objective, echo, guessed=_guessed(measured.wording))


def _refuse_unread(args: argparse.Namespace) -> None:
    """Refuse flags that nobody would read: results that are there need no load."""
    mode = next((name for name in _READ_WITH if getattr(args, name) is not None), None)
    if mode is None:
        if args.check is not None and args.check_echo:
            what = "answers are held against those of --check"
            raise InputError([Problem("--check-echo", what, "give one of the two")])
        return
    require(
        Problem(
            (action.option_strings or ["URL"])[-1],
            f"is not read with --{mode}, which asks no server",
            f"leave it out, or leave out --{mode}",
        )
        for action, _ in _given(args)
        if action.dest not in (mode, *_READ_WITH[mode])
    )


def _asked_by(result: Result) -> argparse.Namespace | None:
    """Return the flags of the command that made a result; None where they are none of today's."""
    parser = Parser(add_help=False)
    configure(parser)
    try:
        return parser.parse_args(shlex.split(result.command)[3:])
    except (InputError, ValueError):
        return None


def _objective_of(result: Result) -> Objective | None:
    """Return the objective that a result was measured with."""
    asked = _asked_by(result)
    if asked is None or asked.slo is None:
        return None
    try:
        return parse_objective(asked.slo, "--slo")
    except InputError:
        # Nobody can mend what was written then.
        return None


def _refuse_other_prompts(
    args: argparse.Namespace, before: Result, streams: Sequence[Turn]
) -> None:
    """Refuse before the load to hold answers against those to other prompts."""
    asked = _asked_by(before)
    other = [
        f"--{name}"
        for name in ("api", "text", "vocabulary", "prefix")
        if asked is not None and getattr(asked, name) != getattr(args, name)
    ]
    if other:
        what = f"it was made with another {' and '.join(other)}"
    else:
        found = (_other_length(*pair) for pair in zip(streams, before.runs, strict=False))
        what = next(filter(None, found), "")
    if what:
        fix = f"give the load that it was made with: {before.command}"
        raise InputError([Problem(args.check, f"the prompts differ: {what}", fix)])


def _other_length(turn: Turn, run: Run) -> str:
    """Say which prompt of a load is longer or shorter than that of an earlier one."""
    wanted = {one.index: one.asked_prompt for one in run.requests}
    for index, request in enumerate(islice(turn.draw(), max(wanted, default=-1) + 1)):
        had, has = wanted.get(index, request.prompt_tokens), request.prompt_tokens
        if had != has:
            return f"that of request {index} has {format_some(had, 'token')}, here {has:,}"
    return ""


def _guessed(wording: Any) -> bool:
    return wording is not None and not wording.counted


def _kept(
    args: argparse.Namespace,
    result: Result,
    objective: Objective | None,
    echo: Echo | None = None,
    *,
    guessed: bool = False,
) -> Answer:
    """Write what was asked for, and answer."""
    if args.save:
        save(result, args.save)
    if args.timeline:
        write_timeline(result, args.timeline)
    if args.plot:
        write_plot(args.plot, [("", result)])
    return answer_of(result, objective, echo, guessed=guessed)


def _named(paths: list[str], results: tuple[Result, Result]) -> list[tuple[str, Result]]:
    names = [Path(path).stem for path in paths]
    if names[0] == names[1]:
        names = list(paths)
    return list(zip(names, results, strict=True))


def _settings(args: argparse.Namespace, before: Result | None) -> Settings:
    temperature = parse_number(args.temperature, "--temperature")
    vocabulary = parse_count(args.vocabulary, "--vocabulary")
    warm_up = parse_count(args.warm_up, "--warm-up")
    ramp_s = parse_seconds(args.ramp, "--ramp")
    timeout_s = parse_seconds(args.timeout, "--timeout")
    duration_s = None if args.duration is None else parse_seconds(args.duration, "--duration")
    require(
        real("--temperature", temperature, 0, 100),
        whole("--vocabulary", vocabulary, least=2, most=10**7),
        whole("--warm-up", warm_up, least=0, most=10_000),
        real("--ramp", ramp_s, 0, 1e6),
        real("--timeout", timeout_s, 1e-3, 1e7),
    )
    base_of(args.url)
    seed = seed_of(args)
    if before is not None and before.seed != seed:
        what = f"was made with seed {before.seed}, which asks other things"
        raise InputError([Problem(args.check, what, f"add --seed {before.seed}")])
    return Settings(
        url=args.url,
        asking=Asking(
            model=args.model or "",
            api=args.api,
            temperature=temperature,
            exact=not (args.natural_ends or args.plain),
            plain=args.plain,
            # Answers are compared as tokens, or as texts where the earlier ones are.
            ids=args.check_echo if before is None else before.asking.ids,
            extra=_extra(args.extra),
        ),
        key=_key(args.key_env),
        text=args.text,
        vocabulary=vocabulary,
        seed=seed,
        warm_up=warm_up,
        ramp_s=ramp_s,
        duration_s=duration_s,
        timeout_s=timeout_s,
        echo=args.check_echo,
        keep=bool(args.check_echo or args.check),
    )


def _extra(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        fix = """write it like '{"top_k": 20}'"""
        raise InputError([Problem("--extra", f"is no JSON object: {error}", fix)]) from None


def _key(variable: str | None) -> str:
    if variable is None:
        return ""
    found = os.environ.get(variable, "")
    if not found:
        raise MissingPart(f"the variable {variable} is not set", f"export {variable}=…")
    return found


def _refuse_lost_work(args: argparse.Namespace) -> None:
    """Refuse before the load what could not be written after it."""
    problems = [
        Problem(f"--{name}", f"{path}: there is no such folder", "make it, or name another")
        for name in ("save", "plot", "timeline")
        if (path := getattr(args, name)) is not None and not Path(path).absolute().parent.is_dir()
    ]
    if args.plot is not None:
        problems += plot_problems(args.plot)
    if args.timeline is not None:
        problems += timeline_problems(args.timeline)
    require(problems)


def command_of(args: argparse.Namespace) -> str:
    """Return the command line that asks for the same again."""
    words = ["mw", "bench", "serve"]
    for action, value in _given(args):
        words += action.option_strings[-1:]
        if action.nargs != 0:
            words += value if isinstance(value, list) else [str(value)]
    return shlex.join(words)


def _given(args: argparse.Namespace) -> Iterator[tuple[argparse.Action, Any]]:
    """Yield the flags that were given, with their values, but for how the answer looks."""
    fresh = argparse.ArgumentParser(add_help=False)
    configure(fresh)
    for action in fresh._actions:  # noqa: SLF001 - argparse has no public list
        value = getattr(args, action.dest, action.default)
        if value != action.default and action.dest not in ("json", "quiet", "no_color", "debug"):
            yield action, value


class _Watching:
    """A line on stderr that says how far a bench is, where a person watches."""

    def __init__(self, *, quiet: bool) -> None:
        watched = sys.stderr.isatty() and not os.environ.get("MESHWRIGHT_NO_PROGRESS")
        self._shown = watched and not quiet
        self._done = self._failed = 0
        self._name = ""

    def __enter__(self) -> "_Watching":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def show(self, turn: Turn, served: Served) -> None:
        """Say it."""
        if not self._shown:
            return
        if turn.name != self._name:
            self._name, self._done, self._failed = turn.name, 0, 0
        self._done += 1
        self._failed += bool(served.fault)
        failed = f", {self._failed} failed" if self._failed else ""
        if self._done % 10 == 1 or served.fault:
            sys.stderr.write(f"\r\x1b[K{self._name}: {self._done} answered{failed}")
            sys.stderr.flush()
