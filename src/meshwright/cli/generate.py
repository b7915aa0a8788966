"""`mw generate`: continue prompts offline, from words, a file, or drawn tokens to measure with."""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.answer import Answer, Note, Text, View, facts
from meshwright.cli.engine_flags import add_engine, model_path, needs_serving, settings_of
from meshwright.cli.parser import add_common
from meshwright.cli.sampling_flags import add_sampling, sampling_of
from meshwright.errors import InputError, Problem
from meshwright.spec.units import format_some

if TYPE_CHECKING:
    from meshwright.run.serve.llm import LLM, Completion

EXAMPLES = (
    'mw generate path/of/model --prompt "The capital of France is" --temperature 0',
    "mw generate path/of/model --file prompts.jsonl --max-tokens 256 --json > answers.json",
    "mw generate path/of/teacher --file chats.jsonl --record told.jsonl",
    "mw generate path/of/model --random-weights --draw 256 --prompt-tokens 100-1024",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw generate [MODEL] --prompt TEXT [flags]"
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a Hugging Face folder or a .gguf file"
    )
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="may be given several times"
    )
    parser.add_argument(
        "--file", metavar="FILE", help='prompts, one to a line: text, or JSON with "prompt"'
    )
    parser.add_argument(
        "--record", metavar="OUT",
        help="write what the model thought of its likeliest words too, to be distilled: the lines "
        "of --file are prompts or chats",
    )  # fmt: skip
    parser.add_argument("--draw", metavar="N", help="measure with so many prompts of random tokens")
    parser.add_argument("--prompt-tokens", metavar="N-M", help="their lengths (default 512)")
    add_sampling(parser)
    add_engine(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with what the model wrote, and how fast."""
    with needs_serving():
        from meshwright.run.serve.llm import LLM

        prompts = [] if args.record else _prompts(args)
        path = model_path(args.model)
        llm = LLM(path, settings_of(args))
        if args.record:
            return _recorded(args, llm)
        given = {} if args.draw is None else {"ignore_eos": True}
        sampling = sampling_of(args, **{"max_tokens": 128, **given})
        drawn = None if args.draw is None else _drawn(args, llm)
        start = time.perf_counter()
        found = llm.generate(drawn or prompts, sampling)
        return _answer(llm, found, time.perf_counter() - start, texts=args.draw is None)


def _recorded(args: argparse.Namespace, llm: "LLM") -> Answer:
    """Write answers down with what the model thought of each token."""
    from meshwright.run.posttrain.supervised.teacher import prompts_of, record

    if args.file is None:
        fix = "name prompts or chats with --file"
        raise InputError([Problem("--record", "there is nothing to answer", fix)])
    sampling = sampling_of(args, max_tokens=512)
    count = record(llm, prompts_of(llm.words, [args.file]), args.record, sampling=sampling)
    told = facts({"wrote": args.record, "answers": f"{count:,}"})
    return Answer("generate/1", {"wrote": args.record, "answers": count}, (told,), (args.record,))


def _answer(llm: "LLM", found: "list[Completion]", seconds: float, *, texts: bool) -> Answer:
    written = sum(len(choice.tokens) for each in found for choice in each.choices)
    read = sum(len(each.prompt) for each in found)
    figures: dict[str, Any] = {
        "prompt_tokens": read,
        "output_tokens": written,
        "seconds": round(seconds, 3),
        "output_tokens_per_s": round(written / seconds, 1),
        "start_s": round(sum(took for _, took in llm.start_up), 3),
    }
    data: dict[str, Any] = dict(figures)
    views: list[View] = []
    if texts:
        data["answers"] = [
            {"text": choice.text, "finish": choice.finish, "tokens": len(choice.tokens)}
            for each in found
            for choice in each.choices
        ]
        views += [Text(each.text) for each in found]
        rate = f"{seconds:.1f} s, {written / seconds:,.0f} a second"
        views.append(Note(f"{format_some(written, 'token')} in {rate}"))
        quiet = tuple(each.text for each in found)
    else:
        views.append(facts(figures))
        quiet = (str(figures["output_tokens_per_s"]),)
    return Answer("generate/1", data, tuple(views), quiet)


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt)
    if args.file is not None:
        prompts += _from_file(args.file)
    if not prompts and args.draw is None:
        if not sys.stdin.isatty():
            prompts = [sys.stdin.read()]
        else:
            fix = 'use --prompt "…", --file, --draw, or a pipe'
            raise InputError([Problem("--prompt", "there is nothing to continue", fix)])
    return prompts


def _from_file(name: str) -> list[str]:
    try:
        lines = Path(name).read_text().splitlines()
    except OSError as error:
        raise InputError([Problem(name, str(error.strerror), "check the path")]) from None
    found = []
    for number, line in enumerate(filter(str.strip, lines), 1):
        if not line.lstrip().startswith("{"):
            found.append(line)
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            what = 'is no JSON with a "prompt"'
            raise InputError([Problem(f"{name}:{number}", what, "mend the line")]) from None
        found.append(str(prompt))
    return found


def _drawn(args: argparse.Namespace, llm: "LLM") -> list[list[int]]:
    """Draw prompts to measure with."""
    try:
        count = int(args.draw)
        low, _, high = (args.prompt_tokens or "512").partition("-")
        least, most = int(low), int(high or low)
        if not (count > 0 and 0 < least <= most):
            raise ValueError
    except ValueError:
        what = f"{args.draw} prompts of {args.prompt_tokens} tokens"
        fix = "use --draw 256 --prompt-tokens 100-1024, say"
        raise InputError([Problem("--draw", what, fix)]) from None
    rng = random.Random(args.seed or 0)
    vocab = min(10_000, llm.engine.vocab)
    return [[rng.randrange(vocab) for _ in range(rng.randint(least, most))] for _ in range(count)]
