"""`mw bench serve URL`: what an OpenAI-compatible server does under load; two results compared."""

import argparse
import os
import shlex
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from meshwright.cli.bench.serve.plot import find_plot_problems, write_plot
from meshwright.cli.bench.serve.screen import make_comparison_result, make_result
from meshwright.cli.flags.requests import add_request_flags, read_seed, read_streams
from meshwright.cli.parser import Parser, add_common
from meshwright.cli.render.progress import ProgressLine
from meshwright.cli.result import CommandResult
from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.observe.bench.serving.answer_check import AnswerCheck, compare_run_answers
from meshwright.observe.bench.serving.openai_protocol import RequestOptions
from meshwright.observe.bench.serving.request_result import RequestResult
from meshwright.observe.bench.serving.request_timeline import (
    check_timeline_folder,
    write_request_timeline,
)
from meshwright.observe.bench.serving.server_probe import parse_base_url
from meshwright.observe.bench.serving.serving_bench import (
    LoadPoint,
    ServingBenchConfig,
    run_serving_bench,
)
from meshwright.observe.bench.serving.serving_metrics import parse_slo
from meshwright.observe.bench.serving.serving_result import (
    ServingBenchResult,
    ServingBenchRun,
    load_result,
    save_result,
)
from meshwright.predict.serving.sim.latency import LatencySLO
from meshwright.spec.field_checks import check_integer, check_number, raise_problems
from meshwright.spec.units import format_quantity, parse_count, parse_number, parse_seconds

SUMMARY = "put load on an OpenAI-compatible server and time every token"

EXAMPLES = (
    "mw bench serve http://127.0.0.1:8000 --concurrency 64 --requests 500",
    "mw bench serve URL --rate 1,2,4,8 --slo ttft=500ms,itl=50ms --save-result a.json --plot a.svg",
    "mw bench serve URL --trace requests.jsonl --arrival-scale 2",
    "mw bench serve --compare a.json b.json",
)

_READ_WITH = {"compare": ("plot",), "show": ("slo", "save_result", "timeline", "plot")}
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
        "--text-prompts",
        action="store_true",
        help="send texts also to completions, for prompts of words",
    )
    parser.add_argument(
        "--vocab-size", default="10000", metavar="N",
        help="draw tokens of prompts below N (default: 10000)",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", default="0", metavar="T", help="of sampling (default: 0, the likeliest)"
    )
    parser.add_argument(
        "--no-ignore-eos", action="store_true",
        help="let answers end where the model ends them, not at the length asked for",
    )  # fmt: skip
    parser.add_argument(
        "--openai-only",
        action="store_true",
        help="send only fields that OpenAI's own API knows",
    )
    parser.add_argument("--extra-body", metavar="JSON", help="more fields for every request")
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable that holds the server's API key"
    )
    add_request_flags(parser)
    parser.add_argument(
        "--ramp-up-time",
        default="0",
        metavar="TIME",
        help="grow to the full load; not counted",
    )
    parser.add_argument(
        "--num-warmups", default="8", metavar="N", help="requests sent before all (default: 8)"
    )
    parser.add_argument(
        "--timeout", default="600s", metavar="TIME", help="of one request (default: 600s)"
    )
    judged = parser.add_argument_group("what is made of it")
    judged.add_argument(
        "--goodput", "--slo", dest="slo", metavar="NAME=TIME,…",
        help="goodput: ttft, itl, tpot, e2e",
    )  # fmt: skip
    judged.add_argument("--save-result", metavar="FILE", help="keep every token's time, as JSON")
    judged.add_argument("--timeline", metavar="DIR", help="keep it as a timeline, for mw timeline")
    judged.add_argument("--plot", metavar="FILE", help="draw it, as SVG")
    judged.add_argument("--show", metavar="FILE", help="show a result again and ask no server")
    judged.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), help="two results, and what is beyond noise"
    )
    judged.add_argument(
        "--check-answers", action="store_true",
        help="ask everything again one at a time; exit with 1 where a token differs",
    )  # fmt: skip
    judged.add_argument(
        "--check-answers-against",
        metavar="FILE",
        help="answers have to be those of an earlier result, likewise",
    )
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with what was measured, is shown, or compared."""
    _refuse_unread(args)
    objective = None if args.slo is None else parse_slo(args.slo, "--slo")
    if args.compare is not None:
        first, second = map(load_result, args.compare)
        if args.plot:
            write_plot(args.plot, _named(args.compare, (first, second)))
        return make_comparison_result(args.compare, first, second)
    if args.show is not None:
        shown = load_result(args.show)
        return _kept(args, shown, objective or _objective_of(shown))
    if args.url is None:
        fix = "mw bench serve http://127.0.0.1:8000"
        raise InputError([Problem("URL", "which server is to be asked?", fix)])
    before = load_result(args.check_answers_against) if args.check_answers_against else None
    settings = _settings(args, before)
    _refuse_lost_work(args)
    streams = [LoadPoint(*stream) for stream in read_streams(args)]
    if before is not None:
        _refuse_other_prompts(args, before, streams)
    with ProgressLine(quiet=args.quiet or args.json) as line:
        progress = _LoadProgress(line)
        measured = run_serving_bench(settings, streams, format_command(args), progress.show)
    echo = measured.answer_check
    if before is not None:
        echo = compare_run_answers(measured.result.runs, before.runs)
    return _kept(args, measured.result, objective, echo, guessed=_guessed(measured.token_words))


def _refuse_unread(args: argparse.Namespace) -> None:
    """Refuse flags that nobody would read: results that are there need no load."""
    mode = next((name for name in _READ_WITH if getattr(args, name) is not None), None)
    if mode is None:
        if args.check_answers_against is not None and args.check_answers:
            what = "answers are compared with those of --check-answers-against"
            raise InputError([Problem("--check-answers", what, "give one of the two")])
        return
    raise_problems(
        Problem(
            (action.option_strings or ["URL"])[-1],
            f"is not read with --{mode}, which asks no server",
            f"leave it out, or leave out --{mode}",
        )
        for action, _ in _given(args)
        if action.dest not in (mode, *_READ_WITH[mode])
    )


def _asked_by(result: ServingBenchResult) -> argparse.Namespace | None:
    """Return the flags of the command that made a result; None where they are none of today's."""
    parser = Parser(add_help=False)
    configure(parser)
    try:
        return parser.parse_args(shlex.split(result.command)[3:])
    except (InputError, ValueError):
        return None


def _objective_of(result: ServingBenchResult) -> LatencySLO | None:
    """Return the objective that a result was measured with."""
    asked = _asked_by(result)
    if asked is None or asked.slo is None:
        return None
    try:
        return parse_slo(asked.slo, "--slo")
    except InputError:
        # Nobody can mend what was written then.
        return None


def _refuse_other_prompts(
    args: argparse.Namespace, before: ServingBenchResult, streams: Sequence[LoadPoint]
) -> None:
    """Refuse before the load to hold answers against those to other prompts."""
    asked = _asked_by(before)
    other = [
        f"--{name.replace('_', '-')}"
        for name in ("api", "text_prompts", "vocab_size", "prefix")
        if asked is not None and getattr(asked, name) != getattr(args, name)
    ]
    if other:
        what = f"it was made with another {' and '.join(other)}"
    else:
        found = (_other_length(*pair) for pair in zip(streams, before.runs, strict=False))
        what = next(filter(None, found), "")
    if what:
        fix = f"give the load that it was made with: {before.command}"
        raise InputError([Problem(args.check_answers_against, f"the prompts differ: {what}", fix)])


def _other_length(turn: LoadPoint, run: ServingBenchRun) -> str:
    """Say which prompt of a load is longer or shorter than that of an earlier one."""
    wanted = {one.index: one.requested_prompt_tokens for one in run.requests}
    for index, request in enumerate(islice(turn.make_requests(), max(wanted, default=-1) + 1)):
        had, has = wanted.get(index, request.prompt_tokens), request.prompt_tokens
        if had != has:
            return f"that of request {index} has {format_quantity(had, 'token')}, here {has:,}"
    return ""


def _guessed(wording: Any) -> bool:
    return wording is not None and not wording.verified


def _kept(
    args: argparse.Namespace,
    result: ServingBenchResult,
    objective: LatencySLO | None,
    echo: AnswerCheck | None = None,
    *,
    guessed: bool = False,
) -> CommandResult:
    """Write what was asked for, and answer."""
    if args.save_result:
        save_result(result, args.save_result)
    if args.timeline:
        write_request_timeline(result, args.timeline)
    if args.plot:
        write_plot(args.plot, [("", result)])
    return make_result(result, objective, echo, guessed=guessed)


def _named(
    paths: list[str], results: tuple[ServingBenchResult, ServingBenchResult]
) -> list[tuple[str, ServingBenchResult]]:
    names = [Path(path).stem for path in paths]
    if names[0] == names[1]:
        names = list(paths)
    return list(zip(names, results, strict=True))


def _settings(args: argparse.Namespace, before: ServingBenchResult | None) -> ServingBenchConfig:
    temperature = parse_number(args.temperature, "--temperature")
    vocabulary = parse_count(args.vocab_size, "--vocab-size")
    warm_up = parse_count(args.num_warmups, "--num-warmups")
    ramp_s = parse_seconds(args.ramp_up_time, "--ramp-up-time")
    timeout_s = parse_seconds(args.timeout, "--timeout")
    duration_s = None if args.duration is None else parse_seconds(args.duration, "--duration")
    raise_problems(
        check_number("--temperature", temperature, 0, 100),
        check_integer("--vocab-size", vocabulary, least=2, most=10**7),
        check_integer("--num-warmups", warm_up, least=0, most=10_000),
        check_number("--ramp-up-time", ramp_s, 0, 1e6),
        check_number("--timeout", timeout_s, 1e-3, 1e7),
    )
    parse_base_url(args.url)
    seed = read_seed(args)
    if before is not None and before.seed != seed:
        what = f"was made with seed {before.seed}, which asks other things"
        raise InputError([Problem(args.check_answers_against, what, f"add --seed {before.seed}")])
    return ServingBenchConfig(
        url=args.url,
        request_options=RequestOptions(
            model=args.model or "",
            api=args.api,
            temperature=temperature,
            ignore_eos=not (args.no_ignore_eos or args.openai_only),
            openai_only=args.openai_only,
            # Answers are compared as tokens, or as texts where the earlier ones are.
            return_token_ids=args.check_answers
            if before is None
            else before.request_options.return_token_ids,
            extra=_extra(args.extra_body),
        ),
        api_key=_key(args.api_key_env),
        text_prompts=args.text_prompts,
        vocab_size=vocabulary,
        seed=seed,
        num_warmups=warm_up,
        ramp_up_s=ramp_s,
        duration_s=duration_s,
        timeout_s=timeout_s,
        check_answers=args.check_answers,
        keep_answers=bool(args.check_answers or args.check_answers_against),
    )


def _extra(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        fix = """write it like '{"top_k": 20}'"""
        raise InputError([Problem("--extra-body", f"is no JSON object: {error}", fix)]) from None


def _key(variable: str | None) -> str:
    if variable is None:
        return ""
    found = os.environ.get(variable, "")
    if not found:
        raise MissingDependency(f"the variable {variable} is not set", f"export {variable}=…")
    return found


def _refuse_lost_work(args: argparse.Namespace) -> None:
    """Refuse before the load what could not be written after it."""
    problems = [
        Problem(
            f"--{name.replace('_', '-')}",
            f"{path}: there is no such folder",
            "make it, or name another",
        )
        for name in ("save_result", "plot", "timeline")
        if (path := getattr(args, name)) is not None and not Path(path).absolute().parent.is_dir()
    ]
    if args.plot is not None:
        problems += find_plot_problems(args.plot)
    if args.timeline is not None:
        problems += check_timeline_folder(args.timeline)
    raise_problems(problems)


def format_command(args: argparse.Namespace) -> str:
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


class _LoadProgress:
    """How many requests of a load have ended, shown after every tenth and every failure."""

    def __init__(self, line: ProgressLine) -> None:
        self._line = line
        self._load = ""
        self._num_done = self._num_failed = 0

    def show(self, load: LoadPoint, request: RequestResult) -> None:
        """Count a request."""
        if load.name != self._load:
            self._load, self._num_done, self._num_failed = load.name, 0, 0
        self._num_done += 1
        self._num_failed += bool(request.error)
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        if self._num_done % 10 == 1 or request.error:
            self._line.show(f"{self._load}: {self._num_done} answered{failed}")
