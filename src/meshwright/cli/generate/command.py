"""`mw generate`: continue prompts offline, from words, a file, or drawn tokens to measure with."""

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from meshwright.cli.flags.engine import (
    MODEL_HELP,
    add_adapter_choice,
    add_engine,
    parse_adapters,
    read_adapter_choice,
    read_engine_config,
    require_serve_extra,
    resolve_model_path,
)
from meshwright.cli.flags.sampling import add_sampling, read_sampling_params
from meshwright.cli.generate.prompts import (
    LocatedPrompt,
    add_prompts,
    check_prompts,
    locate_prompt_error,
    read_prompts,
    read_random_prompt_options,
)
from meshwright.cli.parser import add_common
from meshwright.cli.result import CommandResult, NoteView, TextView, View, make_fields
from meshwright.errors import InputError
from meshwright.spec.name_suggestions import build_unknown_name_problem
from meshwright.spec.units import format_quantity

if TYPE_CHECKING:
    from meshwright.run.serve.llm import LLM, GenerationOutput
    from meshwright.run.serve.request import Request

EXAMPLES = (
    'mw generate path/of/model --prompt "The capital of France is" --temperature 0',
    "mw generate path/of/model --input-file prompts.jsonl --max-tokens 256 --json > answers.json",
    "mw generate path/of/teacher --input-file chats.jsonl --output-file recorded.jsonl",
    "mw generate path/of/model --load-format dummy --num-prompts 256 --random-input-len 100-1024",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw generate [MODEL] --prompt TEXT [flags]"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    add_prompts(parser)
    parser.add_argument(
        "--output-file", metavar="OUT",
        help="also write top logprobs of each token, for distillation: the lines of --input-file "
        "are prompts or chats",
    )  # fmt: skip
    add_sampling(parser)
    add_engine(parser)
    add_adapter_choice(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with what the model wrote, and how fast."""
    with require_serve_extra():
        check_prompts(args)
        if args.output_file:
            return _recorded(args)
        return _written(args) if args.num_prompts is None else _measured(args)


def _recorded(args: argparse.Namespace) -> CommandResult:
    """Write answers down with what the model thought of each token."""
    from meshwright.run.posttrain.supervised.teacher_logprobs import (
        encode_teacher_prompts,
        record_teacher_completions,
    )

    adapter = read_adapter_choice(args)
    sampling = read_sampling_params(args, max_tokens=512)
    llm = _llm(args)
    prompts = encode_teacher_prompts(llm.tokenizer, [args.input_file])
    count = record_teacher_completions(
        _With(llm, adapter), prompts, args.output_file, sampling=sampling
    )
    told = make_fields({"wrote": args.output_file, "answers": f"{count:,}"})
    return CommandResult(
        "generate/1", {"wrote": args.output_file, "answers": count}, (told,), (args.output_file,)
    )


class _With(NamedTuple):
    """A model that answers with one of its adapters."""

    llm: "LLM"
    adapter: str | None

    def run_requests(self, asks: "Sequence[Request]") -> "list[GenerationOutput]":
        """Answer asks, all at once."""
        return self.llm.run_requests([replace(ask, lora_name=self.adapter) for ask in asks])


def _written(args: argparse.Namespace) -> CommandResult:
    """Continue prompts that somebody wrote."""
    from meshwright.run.serve.request import Request

    prompts, usual = read_prompts(args), read_sampling_params(args, max_tokens=128)
    samplings = [line.sampling_params(usual, where) for where, line in prompts.prompts]
    adapters = [_adapter_of(args, each) for each in prompts.prompts]
    llm, asks = _llm(args), list[Request]()
    for (where, line), sampling, adapter in zip(prompts.prompts, samplings, adapters, strict=True):
        tokens = tuple(llm.tokenizer.encode(line.prompt))
        asks.append(Request(prompt_token_ids=tokens, sampling_params=sampling, lora_name=adapter))
        try:
            llm.validate_request(asks[-1])
        except InputError as error:
            raise locate_prompt_error(error, where) from None
    start = time.perf_counter()
    found = llm.run_requests(asks)
    return _answer(llm, found, time.perf_counter() - start, texts=True, left=prompts.unread)


def _adapter_of(args: argparse.Namespace, prompt: LocatedPrompt) -> str | None:
    """Return the adapter that a prompt's line names, or that the flags choose."""
    if prompt.line.adapter is UNSET:
        return read_adapter_choice(args)
    assert not isinstance(prompt.line.adapter, UnsetType)
    name, known = prompt.line.adapter, parse_adapters(args)
    if name is not None and name not in known:
        raise InputError([build_unknown_name_problem("adapter", name, known, prompt.source)])
    return name


def _measured(args: argparse.Namespace) -> CommandResult:
    """Continue prompts that are drawn, and never end early."""
    from meshwright.run.serve.request import Request

    drawn, adapter = read_random_prompt_options(args), read_adapter_choice(args)
    sampling = read_sampling_params(args, max_tokens=128, ignore_eos=True)
    llm = _llm(args)
    asks = [
        Request(prompt_token_ids=tuple(tokens), sampling_params=sampling, lora_name=adapter)
        for tokens in drawn.sample_tokens(llm.engine.vocab_size, sampling.seed or 0)
    ]
    start = time.perf_counter()
    found = llm.run_requests(asks)
    return _answer(llm, found, time.perf_counter() - start, texts=False)


def _llm(args: argparse.Namespace) -> "LLM":
    from meshwright.run.serve.llm import LLM

    return LLM(resolve_model_path(args.model), read_engine_config(args))


def _answer(
    llm: "LLM",
    found: "list[GenerationOutput]",
    seconds: float,
    *,
    texts: bool,
    left: Sequence[str] = (),
) -> CommandResult:
    written = sum(len(choice.token_ids) for each in found for choice in each.outputs)
    read = sum(len(each.prompt_token_ids) for each in found)
    figures: dict[str, Any] = {
        "prompt_tokens": read,
        "output_tokens": written,
        "seconds": round(seconds, 3),
        "output_tokens_per_s": round(written / seconds, 1),
        "start_s": round(sum(took for _, took in llm.startup_s), 3),
    }
    data: dict[str, Any] = dict(figures)
    views: list[View] = []
    if texts:
        data["answers"] = [
            {"text": choice.text, "finish": choice.finish_reason, "tokens": len(choice.token_ids)}
            for each in found
            for choice in each.outputs
        ]
        views += [TextView(each.text, verbatim=True) for each in found]
        rate = f"{seconds:.1f} s, {written / seconds:,.0f} a second"
        views.append(NoteView(f"{format_quantity(written, 'token')} in {rate}"))
        if left:
            views.append(NoteView(f"left aside of the file's lines: {', '.join(sorted(left))}"))
        quiet = tuple(each.text for each in found)
    else:
        views.append(make_fields(figures))
        quiet = (str(figures["output_tokens_per_s"]),)
    return CommandResult("generate/1", data, tuple(views), quiet)
