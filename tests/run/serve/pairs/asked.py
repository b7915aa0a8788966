"""What is asked with two features, and what the answers ought to be.

They are computed one token at a time by a decoder that keeps nothing. Where keys are rounded, or
an adapter stands beside rounded weights, that decoder is none of this kind: a plain engine then
answers one ask after another.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import torch

from meshwright.run.serve.engine.engine_config import EngineConfig
from meshwright.run.serve.engine.sequence_state import StopCondition, TokenStopCondition
from meshwright.run.serve.engine.startup import StartedEngine, start_engine
from meshwright.run.serve.output.detokenizer import StopChecker
from meshwright.run.serve.request import Request, TokenLogprob
from meshwright.run.serve.sampling.grammar_bitmask import GrammarBitmask
from meshwright.run.serve.sampling.sampler import TokenSampler
from meshwright.run.serve.sampling.structured_output import GrammarCompiler
from meshwright.run.serve.sampling_params import SamplingParams, StructuredOutputsParams
from meshwright.run.serve.tokenizer.tokenizer import load_tokenizer
from meshwright.spec.scheduler_config import SchedulerConfig
from tests.run.serve.pairs.heard import Choice, Trial, answered
from tests.run.serve.served_folders import VOCAB, bare, folder, named

OUTPUT = 16
_GRAMMAR = StructuredOutputsParams(kind="regex", text="[a-f ]{9,14}")
_WIDE = StructuredOutputsParams(kind="regex", text="[ -~]{9,14}")
"""What a draft that knows of no grammar may guess now and then."""
_LIMITS = {"max_num_batched_tokens": 32, "max_num_seqs": 5, "block_size": 4, "num_gpu_blocks": 64}
_KINDS = ("window", "latent", "recurrent")

LIMITS: dict[str, dict[str, Any]] = {
    "chunks": {"long_prefill_token_threshold": 5},
    "apart": {"enable_chunked_prefill": False},
    "captured": {"max_cudagraph_capture_size": 32},
    "recompute": {"num_gpu_blocks": 14},
    "swap": {"num_gpu_blocks": 14, "preemption_mode": "swap", "num_cpu_blocks": 32},
    "fp8": {"kv_cache_dtype": "fp8"},
    "priority": {"max_num_seqs": 3},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "ngram": {"num_speculative_tokens": 3},
    "int4": {"quantization": "int4"},
    "batch_invariant": {"batch_invariant": True},
    "ranks": {"tensor_parallel_size": 2},
}
SAMPLING: dict[str, dict[str, Any]] = {
    "choices": {"n": 3},
    "seed": {"temperature": 1.3, "seed": 11, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "logprobs": {"logprobs": 2},
    "structured_outputs": {"structured_outputs": _GRAMMAR},
}


def prompts(words: int = VOCAB) -> list[tuple[int, ...]]:
    """Return prompts, of which some begin alike and one says things twice."""
    draw = torch.Generator().manual_seed(2)
    rows = torch.randint(3, words, (6, 24), generator=draw).tolist()
    start = tuple(rows[0][:16])
    return [
        (*start, *rows[1][:5]),
        (*rows[2][:9],),
        (*start, *rows[3][:3]),
        (*rows[4][:6], *rows[4][:6], *rows[4][:4]),
        (*rows[5][:3],),
    ]


def kinds_of(features: Sequence[str]) -> tuple[str, ...]:
    return tuple(kind for kind in _KINDS if kind in features)


def settings_of(features: Sequence[str]) -> EngineConfig:
    limits: dict[str, Any] = dict(_LIMITS)
    settings: dict[str, Any] = {}
    for name in features:
        limits |= LIMITS.get(name, {})
        settings |= SETTINGS.get(name, {})
    limits["enable_prefix_caching"] = "prefix" in features
    kinds = kinds_of(features)
    beside = folder(kinds[0] if kinds else "")
    if "adapter" in features:
        settings["lora_modules"] = {"poet": str(beside / "adapter")}
    if "draft" in features:
        settings["speculative_model"] = str(
            (folder("") if "recurrent" in kinds else beside) / "draft"
        )
    return EngineConfig(
        scheduler_config=SchedulerConfig(**limits), device="cpu", max_model_len=64, **settings
    )


def asks(features: Sequence[str]) -> list[Request]:
    """Return what is asked with these features."""
    given: dict[str, Any] = {"temperature": 0.0, "max_tokens": OUTPUT}
    for name in features:
        given |= SAMPLING.get(name, {})
    if "structured_outputs" in given and "draft" in features:
        given["structured_outputs"] = _WIDE
    found = []
    for number, prompt in enumerate(prompts()):
        ask = Request(
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(**given),
            lora_name="poet" if "adapter" in features and number % 2 == 0 else None,
            priority=int("priority" in features and number > 1),
            prompt_logprobs=2 if "prompt_logprobs" in features else None,
            tenant=f"tenant {number % 3}" if "priority" in features else "",
        )
        if "stop" in features:
            whole = expected(features, ask)[0].text
            stops = [letter for letter in whole[:-1] if letter != "\ufffd"][-3:]
            sampling = msgspec.structs.replace(ask.sampling_params, stop=tuple(stops[:1]))
            ask = msgspec.structs.replace(ask, sampling_params=sampling)
        found.append(ask)
    return found


def expected(features: Sequence[str], ask: Request) -> list[Choice]:
    """Return the answers to an ask, as they are without anything else."""
    lossy = tuple(name for name in ("int4", "fp8") if name in features)
    plain = msgspec.structs.replace(ask, priority=0, tenant="", remote_kv=None)
    if "fp8" in lossy or ("int4" in lossy and ask.lora_name):
        adapter = ("adapter",) if ask.lora_name else ()
        return _engine_alone((*kinds_of(features), *lossy, *adapter), msgspec.json.encode(plain))
    return [
        _written(kinds_of(features), msgspec.json.encode(plain), choice, "int4" in lossy)
        for choice in range(ask.sampling_params.n)
    ]


@cache
def _engine_alone(features: tuple[str, ...], said: bytes) -> list[Choice]:
    trial = Trial(("", ""))
    started = plain_engine(features)
    answered(trial, started, [msgspec.json.decode(said, type=Request)])
    return trial.heard[0].choices


@cache
def plain_engine(features: tuple[str, ...]) -> StartedEngine:
    return start_engine(named(kinds_of(features)), settings_of(features))


@cache
def _written(kinds: tuple[str, ...], said: bytes, choice: int, int4: bool) -> Choice:
    """Write an answer token by token, with a decoder that keeps nothing."""
    ask = msgspec.json.decode(said, type=Request)
    decoder = bare(kinds, merged=ask.lora_name is not None, int4=int4)
    sampling, ids, found = ask.sampling_params, list(ask.prompt_token_ids), Choice()
    if ask.prompt_logprobs is not None:
        found.told = _told(decoder, ids, ask.prompt_logprobs)
    words = None if len(kinds) > 1 else load_tokenizer(folder(kinds[0] if kinds else ""))
    guide = None
    follows: StopCondition = TokenStopCondition(frozenset(), frozenset(), 0, OUTPUT)
    ends: tuple[int, ...] = ()
    if words is not None:
        ends = tuple(words.eos_token_ids)
        follows = StopChecker(words.create_decoder(()), sampling, ends, OUTPUT)
        if sampling.structured_outputs is not None:
            grammars = GrammarCompiler(
                words.backend_tokenizer.to_str(), VOCAB, sorted(words.eos_token_ids)
            )
            guide = grammars.compile(sampling.structured_outputs)
    while found.finish is None:
        sampler = TokenSampler(1, VOCAB, "cpu", eos=ends)
        sampler.add_row(0, sampling, ask.prompt_token_ids, tuple(found.tokens), choice=choice)
        mask = None
        if guide is not None:
            masks = GrammarBitmask(VOCAB, torch.device("cpu"))
            masks.start_fill([(0, guide, ())], 1)
            mask = masks.result()
        with torch.no_grad():
            logits = decoder(torch.tensor([ids]))[0, -1:].clone()
        drawn = sampler.sample(logits, sampler.build_metadata((0,)), mask_RW=mask)
        token = int(drawn.token_ids[0])
        if guide is not None:
            guide.accept_tokens([token])
        step = follows.add([token], ended=guide is not None and guide.is_terminated)
        ids.append(token)
        found.tokens.append(token)
        found.text, found.finish = found.text + step.text, step.finish_reason
        if drawn.logprobs is not None:
            own, top, names = (part[0] for part in drawn.logprobs)
            others = tuple(zip(names.tolist(), top.tolist(), strict=True))
            found.logprobs.append(TokenLogprob(token, float(own), others))
    return found


def _told(decoder: Any, prompt: list[int], top: int) -> list[TokenLogprob]:
    """Return how likely a prompt's tokens after its first were."""
    with torch.no_grad():
        rows = decoder(torch.tensor([prompt]))[0, :-1].log_softmax(1)
    found = []
    for row, token in zip(rows, prompt[1:], strict=True):
        values, names = row.topk(top)
        others = tuple(zip(names.tolist(), values.tolist(), strict=True))
        found.append(TokenLogprob(token, float(row[token]), others))
    return found
