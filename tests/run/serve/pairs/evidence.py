"""What each of two features has to show for itself, besides right answers."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshwright.run.serve.request import TokenLogprob
from scripts.serve_features import IDLE
from tests.run.serve.pairs.asked import asks, expected, kinds_of, plain_engine
from tests.run.serve.pairs.heard import Choice, Heard, Trial
from tests.run.serve.served_folders import bare


def check(trial: Trial) -> None:
    """Check answers, and that each feature did what it is for."""
    for heard in trial.heard:
        assert not heard.error, heard.error
        for found, want in zip(heard.choices, expected(trial.features, heard.ask), strict=True):
            _same(found, want)
    for name in trial.features:
        if name in SEEN:
            assert SEEN[name](trial), f"nothing was seen of {name}"
    for each in trial.engines:
        assert each.engine.is_idle
        assert each.engine.scheduler.block_pool.used_block_count == 0
        each.engine.close()


def _same(found: Choice, want: Choice) -> None:
    if found.finish == "abort":
        assert found.tokens == want.tokens[: len(found.tokens)]
        assert want.text.startswith(found.text)
    else:
        assert (found.tokens, found.finish) == (want.tokens, want.finish)
        assert found.text == want.text
    _as_likely(found.logprobs, want.logprobs[: len(found.tokens)])
    _as_likely(found.told, want.told if found.tokens else [])


def _as_likely(found: list[TokenLogprob], want: list[TokenLogprob]) -> None:
    assert [each.token_id for each in found] == [each.token_id for each in want]
    for one, other in zip(found, want, strict=True):
        assert abs(one.logprob - other.logprob) < 1e-3
        assert [token for token, _ in one.top_logprobs] == [
            token for token, _ in other.top_logprobs
        ]


def _without(trial: Trial, name: str) -> bool:
    """Say whether some answer is another without a feature."""
    others = [other for other in trial.features if other not in (name, "stop")]
    plain = [expected(others, ask) for ask in asks(others)]
    both = [expected(trial.features, heard.ask) for heard in trial.heard]
    return any(
        one.tokens != other.tokens[: len(one.tokens)]
        for ones, others in zip(both, plain, strict=True)
        for one, other in zip(ones, others, strict=False)
    )


def _prompts_alone(trial: Trial) -> bool:
    return not any(
        any(not part.verifies_drafts for part in orders.chunks)
        and (decodes or any(part.verifies_drafts for part in orders.chunks))
        for decodes, orders in trial.steps
    )


def _vectors(trial: Trial) -> bool:
    """Say whether vectors are those of the same prompts alone, and of the adapter where one is."""
    kept = tuple(name for name in ("int4", "fp8") if trial.has(name))
    kinds, wave, found = kinds_of(trial.features), trial.heard[1:], torch.tensor(trial.vectors)
    prompts = [wave[0].ask.prompt_token_ids, wave[-1].ask.prompt_token_ids]
    plain = torch.tensor(plain_engine((*kinds, *kept)).lifecycle.embed(prompts))
    if not trial.has("adapter"):
        return torch.allclose(found, plain, atol=1e-4)
    if kept:
        engine = plain_engine((*kinds, *kept, "adapter"))
        alone = torch.tensor(engine.lifecycle.embed(prompts, adapter="poet"))
    else:
        alone = torch.stack([_pooled(bare(kinds, merged=True), prompt) for prompt in prompts])
    return torch.allclose(found, alone, atol=1e-4) and not torch.allclose(found, plain, atol=1e-2)


@torch.no_grad()
def _pooled(decoder: Any, prompt: Sequence[int]) -> torch.Tensor:
    hidden_TD = decoder.compute_hidden_states(torch.tensor([prompt]))[0]
    return torch.nn.functional.normalize(hidden_TD.float().sum(0), dim=0)


def _finishes(trial: Trial) -> list[str | None]:
    return [choice.finish for heard in trial.heard for choice in heard.choices]


def _hits(trial: Trial) -> bool:
    hits = trial.engines[0].engine.stats().prefix_hits
    idle = {name for pair in IDLE if "prefix" in pair for name in pair} - {"prefix"}
    return hits == 0 if idle & set(trial.features) else hits >= 16


def _captured(trial: Trial) -> bool:
    """Say whether steps with prompts were computed as graphs have them, unless they cannot be."""
    runners: list[Any] = [each.engine.runner for each in trial.engines]
    mixed = [getattr(runner, "_runner", runner).mixed_graphs for runner in runners]
    steps: int = sum(each.steps for each in mixed if each is not None)
    idle = {name for pair in IDLE if "captured" in pair for name in pair} - {"captured"}
    return steps == 0 if idle & set(trial.features) else steps > 0


def _bound(heard: Heard) -> str:
    grammar = heard.ask.sampling_params.structured_outputs
    return "" if grammar is None else grammar.text


SEEN: dict[str, Callable[[Trial], bool]] = {
    "prefix": _hits,
    "chunks": lambda trial: (
        max(len(p.token_ids) for _,
        orders in trial.steps for p in orders.chunks if not p.verifies_drafts) == 5
    ),
    "apart": _prompts_alone,
    "captured": _captured,
    "recompute": lambda trial: any(e.engine.scheduler.num_preemptions for e in trial.engines),
    "swap": lambda trial: any(orders.swap_in for _, orders in trial.steps),
    "choices": lambda trial: all(len(heard.choices) == 3 for heard in trial.heard),
    "seed": lambda trial: _without(trial, "seed"),
    "penalties": lambda trial: _without(trial, "penalties"),
    "logprobs": lambda trial: all(
        len(told.top_logprobs) == 2
        for heard in trial.heard for choice in heard.choices for told in choice.logprobs
    ),
    "stop": lambda trial: any(
        finish == "stop" and heard.ask.sampling_params.stop
        for heard in trial.heard for finish in (choice.finish for choice in heard.choices)
    ),
    "structured_outputs": lambda trial: any(
        choice.finish == "stop" and re.fullmatch(_bound(heard), choice.text) is not None
        for heard in trial.heard for choice in heard.choices
    ) or trial.has("stop"),
    "ngram": lambda trial: any(
        part.verifies_drafts and len(part.token_ids) > 1 for _,
        orders in trial.steps for part in orders.chunks
    ),
    "draft": lambda trial: any(
        choice.at_once > 1 for heard in trial.heard for choice in heard.choices
    ),
    "prompt_logprobs": lambda trial: all(
        len(choice.told) == len(heard.ask.prompt_token_ids) - 1
        for heard in trial.heard for choice in heard.choices if choice.finish != "abort"
    ),
    "adapter": lambda trial: _without(trial, "adapter"),
    "fp8": lambda trial: trial.engines[0].engine.runner.kv_cache.dtype == torch.float8_e4m3fn,
    "int4": lambda trial: any(
        weight.dtype == torch.uint8
        for weight in trial.engines[0].engine.runner.model.decoder.parameters()
    ),
    "embeddings": _vectors,
    "cancel": lambda trial: _finishes(trial).count("abort") >= 2,
    "priority": lambda trial: min(trial.heard[1:], key=lambda h: h.order).ask.priority == 1,
    "kv_transfer": lambda trial: trial.transfers == len(trial.heard),
    "batch_invariant": lambda trial: (
        trial.engines[0].engine.runner.model.forward_context.batch_invariant
    ),
    "sleep": lambda trial: trial.slept,
    "ranks": lambda _: torch.distributed.get_world_size() == 2,
}  # fmt: skip
