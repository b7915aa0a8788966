"""`mw generate`: continue prompts offline, from words, a file, or drawn tokens to measure with."""

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from meshwright.cli.answer import Answer, Note, Text, View, facts
from meshwright.cli.engine_flags import (
    MODEL_HELP,
    adapters_of,
    add_choice,
    add_engine,
    chosen_adapter,
    model_path,
    needs_serving,
    settings_of,
)
from meshwright.cli.parser import add_common
from meshwright.cli.prompt_flags import (
    Prompt,
    add_prompts,
    check_prompts,
    drawn_of,
    located,
    read_prompts,
)
from meshwright.cli.sampling_flags import add_sampling, sampling_of
from meshwright.errors import InputError
from meshwright.spec.names import unknown_name
from meshwright.spec.units import format_some

if TYPE_CHECKING:
    from meshwright.run.serve.asked import Ask
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
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    add_prompts(parser)
    parser.add_argument(
        "--record", metavar="OUT",
        help="write what the model thought of its likeliest words too, to be distilled: the lines "
        "of --file are prompts or chats",
    )  # fmt: skip
    add_sampling(parser)
    add_engine(parser)
    add_choice(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with what the model wrote, and how fast."""
    with needs_serving():
        check_prompts(args)
        if args.record:
            return _recorded(args)
        return _written(args) if args.draw is None else _measured(args)


def _recorded(args: argparse.Namespace) -> Answer:
    """Write answers down with what the model thought of each token."""
    from meshwright.run.posttrain.supervised.teacher import prompts_of, record

    adapter = chosen_adapter(args)
    sampling = sampling_of(args, max_tokens=512)
    llm = _llm(args)
    prompts = prompts_of(llm.words, [args.file])
    count = record(_With(llm, adapter), prompts, args.record, sampling=sampling)
    told = facts({"wrote": args.record, "answers": f"{count:,}"})
    return Answer("generate/1", {"wrote": args.record, "answers": count}, (told,), (args.record,))


class _With(NamedTuple):
    """A model that answers with one of its adapters."""

    llm: "LLM"
    adapter: str | None

    def answer(self, asks: "Sequence[Ask]") -> "list[Completion]":
        """Answer asks, all at once."""
        return self.llm.answer([replace(ask, adapter=self.adapter) for ask in asks])


def _written(args: argparse.Namespace) -> Answer:
    """Continue prompts that somebody wrote."""
    from meshwright.run.serve.asked import Ask

    prompts, usual = read_prompts(args), sampling_of(args, max_tokens=128)
    samplings = [line.sampling(usual, where) for where, line in prompts.found]
    adapters = [_adapter_of(args, each) for each in prompts.found]
    llm, asks = _llm(args), list[Ask]()
    for (where, line), sampling, adapter in zip(prompts.found, samplings, adapters, strict=True):
        tokens = tuple(llm.words.encode(line.prompt))
        asks.append(Ask(prompt=tokens, sampling=sampling, adapter=adapter))
        try:
            llm.check(asks[-1])
        except InputError as error:
            raise located(error, where) from None
    start = time.perf_counter()
    found = llm.answer(asks)
    return _answer(llm, found, time.perf_counter() - start, texts=True, left=prompts.left)


def _adapter_of(args: argparse.Namespace, prompt: Prompt) -> str | None:
    """Return the adapter that a prompt's line names, or that the flags choose."""
    if prompt.line.adapter is UNSET:
        return chosen_adapter(args)
    assert not isinstance(prompt.line.adapter, UnsetType)
    name, known = prompt.line.adapter, adapters_of(args)
    if name is not None and name not in known:
        raise InputError([unknown_name("adapter", name, known, prompt.where)])
    return name


def _measured(args: argparse.Namespace) -> Answer:
    """Continue prompts that are drawn, and never end early."""
    from meshwright.run.serve.asked import Ask

    drawn, adapter = drawn_of(args), chosen_adapter(args)
    sampling = sampling_of(args, max_tokens=128, ignore_eos=True)
    llm = _llm(args)
    asks = [
        Ask(prompt=tuple(tokens), sampling=sampling, adapter=adapter)
        for tokens in drawn.tokens(llm.engine.vocab, sampling.seed or 0)
    ]
    start = time.perf_counter()
    found = llm.answer(asks)
    return _answer(llm, found, time.perf_counter() - start, texts=False)


def _llm(args: argparse.Namespace) -> "LLM":
    from meshwright.run.serve.llm import LLM

    return LLM(model_path(args.model), settings_of(args))


def _answer(
    llm: "LLM",
    found: "list[Completion]",
    seconds: float,
    *,
    texts: bool,
    left: Sequence[str] = (),
) -> Answer:
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
        if left:
            views.append(Note(f"left aside of the file's lines: {', '.join(sorted(left))}"))
        quiet = tuple(each.text for each in found)
    else:
        views.append(facts(figures))
        quiet = (str(figures["output_tokens_per_s"]),)
    return Answer("generate/1", data, tuple(views), quiet)
