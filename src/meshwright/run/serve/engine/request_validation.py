"""What can be asked of an engine, and what is wrong with an ask that cannot be answered."""

from typing import NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.run.serve.request import Request
from meshwright.run.serve.sampling.sampling_metadata import find_sampling_problems
from meshwright.spec.field_checks import check_integer
from meshwright.spec.name_suggestions import build_unknown_name_problem


class EngineCapabilities(NamedTuple):
    """What an engine answers."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    """Answers to one prompt, at most."""
    lora_names: tuple[str, ...]
    has_tokenizer: bool
    """Whether it can make text of tokens."""
    is_sleeping: bool
    supports_kv_transfer: bool
    """Whether keys and values can go to another engine, or come from one."""
    block_size: int
    block_bytes: int


def validate_request(request: Request, offer: EngineCapabilities) -> None:
    """Raise `InputError` with everything that keeps an ask from being answered."""
    problems = [
        *_prompt(request.prompt_token_ids, offer),
        *find_sampling_problems(request.sampling_params, offer.vocab_size),
        *_extras(request, offer),
    ]
    if problems:
        raise InputError(problems)


def _prompt(prompt: tuple[int, ...], offer: EngineCapabilities) -> list[Problem]:
    if not prompt:
        return [Problem("prompt", "holds no token", "give one at least")]
    problems = []
    if not 0 <= min(prompt) <= max(prompt) < offer.vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < offer.vocab_size)
        fix = f"use ids from 0 to {offer.vocab_size - 1}"
        problems.append(Problem("prompt", f"{wrong} is no token of this model", fix))
    if len(prompt) >= offer.max_model_len:
        what = f"{len(prompt):,} tokens leave no room for an answer in {offer.max_model_len:,}"
        problems.append(Problem("prompt", what, "shorten it"))
    return problems


def _extras(request: Request, offer: EngineCapabilities) -> list[Problem]:
    sampling, problems = request.sampling_params, []
    if offer.is_sleeping:
        problems.append(Problem("engine", "is sleeping", "wake it up first"))
    if sampling.n > offer.max_num_seqs:
        what = f"{sampling.n} answers at a time, the engine has {offer.max_num_seqs}"
        problems.append(Problem("n", what, f"use at most {offer.max_num_seqs}"))
    if request.lora_name is not None and request.lora_name not in offer.lora_names:
        problems.append(
            build_unknown_name_problem("adapter", request.lora_name, offer.lora_names, "lora_name")
        )
    if (request.do_remote_decode or request.remote_kv is not None) and (
        sampling.n > 1 or not offer.supports_kv_transfer
    ):
        what = (
            "KV transfer is for one completion of a model on one device, without recurrent states"
            " or draft tokens"
        )
        problems.append(Problem("do_remote_decode", what, "ask one engine for it"))
    if (
        request.remote_kv is not None
        and sampling.logprobs is not None
        and request.remote_kv.first_token_logprob is None
    ):
        what = "nothing tells how likely the token was that came with keys and values"
        problems.append(Problem("remote_kv", what, "hand the prompt over with logprobs too"))
    held = -(-len(request.prompt_token_ids) // offer.block_size)
    if request.remote_kv is not None and request.remote_kv.size_bytes != held * offer.block_bytes:
        what = f"{request.remote_kv.size_bytes:,} bytes for {held} blocks of {offer.block_bytes:,}"
        fix = "both engines need the same model, block size and number format"
        problems.append(Problem("remote_kv", what, fix))
    if request.prompt_logprobs is not None:
        problems += check_integer("prompt_logprobs", request.prompt_logprobs, least=0, most=20)
        if request.do_remote_decode or request.remote_kv is not None:
            what = "prompt logprobs are not supported together with KV transfer"
            problems.append(Problem("prompt_logprobs", what, "ask one engine for it"))
    problems += [
        Problem(name, "requires a tokenizer; this engine was started without one", "leave it out")
        for name in ("stop", "structured_outputs")
        if getattr(sampling, name) and not offer.has_tokenizer
    ]
    return problems
