"""Prints which features of the serving engine can be used together, as tables in Markdown.

    python -m scripts.serve_features

A pair that is not named in `REFUSED` or `IDLE` works: answers are those of either feature alone.
tests/run/serve/test_features.py tries every pair, so nothing stands here that was not seen.
docs/guide/serve-features.md shows the tables as they are when the site is built.
"""

from itertools import combinations
from typing import Literal, NamedTuple

Verdict = Literal["works", "idle", "refused", "either"]


class Feature(NamedTuple):
    """Something an engine can do, and how it is asked for."""

    title: str
    how: str


class Refusal(NamedTuple):
    """Why two features are refused together, and words of the error that says so."""

    why: str
    said: str


FEATURES = {
    "prefix": Feature("prefix cache", "on, unless `--no-enable-prefix-caching`"),
    "chunks": Feature("chunked prefill", "`SchedulerConfig.long_prefill_token_threshold`"),
    "apart": Feature("no chunked prefill", "`SchedulerConfig.enable_chunked_prefill = False`"),
    "captured": Feature("prompts in captured steps", "`--max-cudagraph-capture-size N`"),
    "recompute": Feature("preemption: recompute", "the default"),
    "swap": Feature("preemption: swap", "`--preemption-mode swap --num-cpu-blocks N`"),
    "choices": Feature("several completions of a prompt", "`n`"),
    "seed": Feature("seeds", "`seed`"),
    "penalties": Feature("penalties", "`repetition_penalty` and others"),
    "logprobs": Feature("logprobs", "`logprobs`"),
    "prompt_logprobs": Feature("prompt logprobs", "`echo` with `logprobs`"),
    "stop": Feature("stop texts", "`stop`"),
    "structured_outputs": Feature("grammars", "`response_format`, `structured_outputs`, tools"),
    "ngram": Feature("n-gram draft tokens", "`--num-speculative-tokens N`"),
    "draft": Feature("draft tokens of a model", "`--speculative-model PATH`"),
    "adapter": Feature("LoRA adapters", "`--lora-modules NAME=FOLDER`"),
    "fp8": Feature("keys and values in fp8", "`--kv-cache-dtype fp8`"),
    "int4": Feature("weights in four bits", "`--quantization int4`"),
    "embeddings": Feature("embeddings beside answers", "`/v1/embeddings`"),
    "cancel": Feature("cancelling", "closing the connection"),
    "priority": Feature("priorities and tenants", "`priority`, API keys"),
    "kv_transfer": Feature("prompts handed over", "`--prefill-replicas N --decode-replicas M`"),
    "window": Feature("sliding windows", "the model"),
    "latent": Feature("latent attention", "the model"),
    "recurrent": Feature("recurrent layers", "the model"),
    "batch_invariant": Feature("the same bits in any batch", "`--batch-invariant`"),
    "sleep": Feature("sleep and waking", "`/sleep`, `/wake_up`"),
    "ranks": Feature("several ranks", "`--tp N`"),
}

_CUT = "its products are cut by the size of the batch"
_TAKES_NONE = "an engine with speculative decoding takes no prompts from others"
_NOT_BACK = "recurrent states cannot be rolled back when a draft token is rejected"

REFUSED = {
    ("choices", "kv_transfer"): Refusal(
        "several answers share a prompt's blocks only where it is computed",
        "one completion of a model",
    ),
    ("ngram", "kv_transfer"): Refusal(_TAKES_NONE, "without recurrent states"),
    ("draft", "kv_transfer"): Refusal(_TAKES_NONE, "without recurrent states"),
    ("prompt_logprobs", "kv_transfer"): Refusal(
        "what a prompt was computed with is not sent; behind `mw serve` one engine does both",
        "not supported together with KV transfer",
    ),
    ("kv_transfer", "recurrent"): Refusal(
        "states are no blocks, and are not sent", "without recurrent states"
    ),
    ("kv_transfer", "ranks"): Refusal(
        "every rank has a part of the keys, and one device sends", "on one device"
    ),
    ("swap", "recurrent"): Refusal(
        "states are no blocks, and are not moved: they are computed again",
        "states of recurrent layers are not moved",
    ),
    ("ngram", "recurrent"): Refusal(_NOT_BACK, "cannot be rolled back"),
    ("draft", "recurrent"): Refusal(_NOT_BACK, "cannot be rolled back"),
    ("captured", "recurrent"): Refusal(
        "states are computed row by row, with lengths that the host knows",
        "states of recurrent layers are computed row by row",
    ),
    ("captured", "batch_invariant"): Refusal(
        "one kernel reads all rows as they come", "one kernel reads all rows"
    ),
    ("adapter", "batch_invariant"): Refusal(_CUT, "adapters depend on what else"),
    ("int4", "batch_invariant"): Refusal(_CUT, "quantised weights depend on what else"),
    ("latent", "batch_invariant"): Refusal(_CUT, "latent attention depend on what else"),
    ("recurrent", "batch_invariant"): Refusal(_CUT, "recurrences and latent attention depend"),
    ("adapter", "ranks"): Refusal(
        "adapters are not shared out between ranks", "adapters are served on one device"
    ),
    ("draft", "ranks"): Refusal("a draft runs beside its model", "a draft is served on one device"),
    ("batch_invariant", "ranks"): Refusal(
        "sums over ranks are cut by the size of the batch", "sums over ranks are cut"
    ),
}

IDLE: dict[tuple[str, str], str] = {
    (
        "prefix",
        "prompt_logprobs",
    ): "of what is found nobody could tell how likely it was: it is computed",
    ("prefix", "recurrent"): "states have no blocks to share: every prompt is computed",
    (
        "captured",
        "prompt_logprobs",
    ): "a step that tells of prompts has other outputs: it is launched singly",
}
"""Pairs that can be asked for, where one of the two has nothing to do."""

EITHER = {
    ("recompute", "swap"): "one setting chooses between them",
    (
        "ngram",
        "draft",
    ): "with a draft model, `--num-speculative-tokens` is the number of its draft tokens",
}
"""Pairs of which there is only one at a time."""


def verdict(one: str, other: str) -> tuple[Verdict, str]:
    """Return what is said of a pair, and why."""
    for pair in ((one, other), (other, one)):
        if pair in REFUSED:
            return "refused", REFUSED[pair].why
        if pair in IDLE:
            return "idle", IDLE[pair]
        if pair in EITHER:
            return "either", EITHER[pair]
    return "works", ""


def pairs() -> list[tuple[str, str]]:
    """Return every pair of features."""
    return list(combinations(FEATURES, 2))


_SIGNS: dict[Verdict, str] = {"works": "✓", "idle": "○", "refused": "✗", "either": "–"}


def _matrix() -> list[str]:
    names = list(FEATURES)
    numbers = [str(number) for number in range(1, len(names))]
    lines = ["| | | " + " | ".join(numbers) + " |", "| ---: | --- |" + " :-: |" * len(numbers)]
    for row, one in enumerate(names):
        signs = [_SIGNS[verdict(other, one)[0]] for other in names[:row]]
        signs += [""] * (len(numbers) - row)
        lines.append(f"| {row + 1} | {FEATURES[one].title} | {' | '.join(signs)} |")
    return lines


def _named(found: dict[tuple[str, str], str]) -> list[str]:
    lines = ["| feature | with | why |", "| --- | --- | --- |"]
    for (one, other), why in found.items():
        lines.append(f"| {FEATURES[one].title} | {FEATURES[other].title} | {why} |")
    return lines


def page() -> str:
    """Return the tables."""
    how = ["| | feature | asked for by |", "| ---: | --- | --- |"]
    for number, feature in enumerate(FEATURES.values(), 1):
        how.append(f"| {number} | {feature.title} | {feature.how} |")
    count = len(pairs())
    works = count - len(REFUSED) - len(IDLE) - len(EITHER)
    refused = {pair: refusal.why for pair, refusal in REFUSED.items()}
    parts = [
        [f"Of {count} pairs {works} work (✓) and {len(REFUSED)} are refused (✗)."],
        _matrix(), ["What is refused:"], _named(refused),
        ["Where one of the two has nothing to do (○), or there is only one at a time (–):"],
        _named(IDLE | EITHER), ["How each is asked for:"], how,
    ]  # fmt: skip
    return "\n\n".join("\n".join(part) for part in parts)


if __name__ == "__main__":
    print(page())
