"""`mw evaluate`: how often a model answers held-out questions right, or a reward model prefers."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.flags.engine import (
    add_engine,
    parse_adapters,
    read_engine_config,
    require_serve_extra,
    resolve_model_path,
)
from meshwright.cli.flags.sampling import add_sampling, read_sampling_params
from meshwright.cli.parser import add_common
from meshwright.cli.render.files import write_text
from meshwright.cli.result import CommandResult, NoteView, View, make_table
from meshwright.errors import InputError, Problem
from meshwright.spec.units import format_quantity

if TYPE_CHECKING:
    from meshwright.run.posttrain.evaluation import EvaluationReport, SubprocessCodeRunner
    from meshwright.run.posttrain.rollout.verifiers.sandbox.sandbox_config import SandboxStatus

EXAMPLES = (
    "mw evaluate path/of/model held-out.jsonl",
    "mw evaluate path/of/model chats.jsonl --validation 0.05 --lora-modules "
    "own=runs/model-lora/adapter",
    "mw evaluate path/of/model tasks.jsonl --n 20 --pass-at 1,10 --temperature 0.8",
    "mw evaluate path/of/reward-model pairs.jsonl",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "model", metavar="MODEL", help="a Hugging Face folder or a .gguf file; or a reward model"
    )
    parser.add_argument(
        "questions", nargs="+", metavar="FILE",
        help="JSON lines or Parquet: prompt with answer, choices or tests; chats; pairs",
    )  # fmt: skip
    parser.add_argument(
        "--validation", metavar="SHARE", help="ask only the share that training held out"
    )
    parser.add_argument("--n", metavar="N", help="answers to each question (default 1)")
    parser.add_argument(
        "--pass-at", metavar="N,N", help="also how often one of so many answers is right"
    )
    parser.add_argument(
        "--pattern", default="", metavar="REGEX", help="the answer is its last match in the text"
    )
    parser.add_argument(
        "--normalization", default="strip", choices=("strip", "words", "number"),
        help="what does not count: spaces around, also case and punctuation, or all but the "
        "number that an answer comes to (default: strip)",
    )  # fmt: skip
    parser.add_argument(
        "--isolation", default="best-effort", choices=("strict", "best-effort", "none"),
        help="how programs that the model wrote are isolated: as far as this kernel allows, or "
        "not at all; strict refuses where something stays unprotected (default: best-effort)",
    )  # fmt: skip
    parser.add_argument("--out", metavar="FILE", help="write the verdict on every question here")
    add_sampling(parser)
    add_engine(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with shares and their intervals."""
    with require_serve_extra():
        from meshwright.run.posttrain.evaluation import SubprocessCodeRunner
        from meshwright.run.posttrain.supervised.reward_model import HEAD_FILE

        share = 0.0 if args.validation is None else _share(args.validation)
        path, adapters = resolve_model_path(args.model), parse_adapters(args)
        if len(adapters) > 1:
            what = f"{', '.join(adapters)} are several, and one answers"
            raise InputError([Problem("--lora-modules", what, "evaluate each by itself")])
        folder = Path(next(iter(adapters.values()), path))
        if (folder / HEAD_FILE).is_file():
            return _answer(args, _preferred(args, path, adapters, share))
        runner = SubprocessCodeRunner(isolation=args.isolation)
        return _answer(args, _answered(args, path, adapters, share, runner), runner.sandbox_status)


def _answered(
    args: argparse.Namespace,
    path: Path,
    adapters: dict[str, str],
    share: float,
    runner: "SubprocessCodeRunner",
) -> "EvaluationReport":
    from meshwright.run.posttrain.evaluation import evaluate, read_questions
    from meshwright.run.serve.llm import LLM

    at = (
        []
        if args.pass_at is None
        else [_count("--pass-at", one) for one in args.pass_at.split(",")]
    )
    several = 1 if args.n is None else _count("--n", args.n)
    usual: dict[str, Any] = {"temperature": 0.0, "max_tokens": 256, "n": max(several, *at, 1)}
    questions = read_questions(args.questions, validation=share)
    return evaluate(
        LLM(path, read_engine_config(args)),
        questions,
        sampling=read_sampling_params(args, **usual),
        at=at,
        pattern=args.pattern,
        normalization=args.normalization,
        adapter=next(iter(adapters), None),
        runner=runner,
    )


def _preferred(
    args: argparse.Namespace, path: Path, adapters: dict[str, str], share: float
) -> "EvaluationReport":
    from meshwright.run.posttrain.supervised.reward_accuracy import score_preference_pairs

    adapter = next(iter(adapters.values()), None)
    return score_preference_pairs(
        path, args.questions, adapter=adapter, validation=share, device=args.device
    )


def _answer(
    args: argparse.Namespace, report: "EvaluationReport", isolation: "SandboxStatus | None" = None
) -> CommandResult:
    import msgspec

    rows = [
        (one.name, f"{one.share:.1%}", f"{one.low:.1%} – {one.high:.1%}", one.questions)
        for one in report.scores
    ]
    views: list[View] = [
        make_table("score, share, 95 of 100 samples, questions", rows, right="share, questions")
    ]
    if report.num_truncated:
        cut = format_quantity(report.num_truncated, "answer")
        views.append(NoteView(f"{cut} ended by --max-tokens, which may be too low"))
    if args.out is not None:
        lines = (msgspec.json.encode(one).decode() + "\n" for one in report.results)
        write_text(args.out, "".join(lines))
        views.append(NoteView(f"wrote {args.out}"))
    if isolation is not None:
        views.append(NoteView(f"programs were isolated by {isolation}"))
    data: dict[str, Any] = {
        "scores": msgspec.to_builtins(report.scores),
        "num_truncated": report.num_truncated,
        "isolation": None if isolation is None else {
            "active": list(isolation.active), "missing": dict(isolation.missing),
            "unprotected": isolation.find_unprotected(),
        },
    }  # fmt: skip
    quiet = tuple(f"{one.name} {one.share:.4f}" for one in report.scores)
    return CommandResult("evaluate/2", data, tuple(views), quiet)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 < share <= 0.5:
        what, fix = f"{text!r} is no share", "give that of data.validation_fraction, such as 0.05"
        raise InputError([Problem("--validation", what, fix)])
    return share


def _count(flag: str, text: str) -> int:
    if text.strip().isdecimal() and int(text):
        return int(text)
    raise InputError([Problem(flag, f"{text!r} is no number of answers", "use 1 or more")])
