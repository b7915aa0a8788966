"""`RewardScorer`: a reward model as one of those who judge.

It reads the tokens of prompt and answer as the engine drew them, each answer by itself: what else
is scored changes no bit, so that equal answers get equal rewards, and a run that goes on, or whose
answers end in another order, has those it would have had.
"""

import math
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.questions.environment import judge_of
from meshwright.run.posttrain.questions.settings import ModelReward
from meshwright.run.posttrain.rollouts.record import RewardPart
from meshwright.run.posttrain.rollouts.verifiers.check import Check
from meshwright.run.posttrain.rollouts.verifiers.child import LARGEST
from meshwright.run.posttrain.supervised.reward import FILE, RewardModel
from meshwright.run.serve.engine.build import device_of
from meshwright.run.serve.model.words import Words, load_words
from meshwright.spec.model.huggingface import load_config

_WEIGHTS = frozenset({".safetensors", ".json"})
_AT_ONCE = 1 << 24


def reward_problems(reward: ModelReward, words: Words, longest: int) -> Iterator[Problem]:
    """Say why a reward model cannot judge answers of a policy, from its files alone.

    `longest` is what a prompt with its answer may have, `words` those of the policy.
    """
    folder = Path(reward.adapter or reward.model)
    if not (folder / FILE).is_file():
        where, fix = "model", "export a run of mw train --recipe reward"
        if reward.adapter:
            where, fix = "adapter", "give RUN/adapter of a run of mw train --recipe reward"
        yield Problem(where, f"{folder} holds no {FILE}, so it gives no rewards", fix)
        return
    if not (Path(reward.model) / "config.json").is_file():
        what = f"{reward.model} holds no config.json, so no whole model lies there"
        fix = "write one with mw export RUN FOLDER --merge, or name its model, and it as adapter"
        yield Problem("model", what, fix)
        return
    try:
        device_of(reward.device or "cpu")
    except InputError as error:
        yield from error.problems
    theirs, ours = load_words(reward.model).tokenizer.get_vocab(), words.tokenizer.get_vocab()
    if theirs != ours:
        other = next(iter(sorted(theirs.items() ^ ours.items(), key=lambda each: each[1])))
        what = f"{reward.model} has another vocabulary than the policy ({other[0]!r} for one)"
        fix = "train it from the same model, or from one with the same tokenizer"
        yield Problem("model", what, fix)
    room = load_config(reward.model).max_positions
    if longest > room:
        what = f"reads {room:,} tokens, and a prompt with its answer may have {longest:,}"
        yield Problem("model", what, "use a lower max_tokens, or task.max_prompt_tokens")


class RewardScorer:
    """Gives the scores of one reward model; used by one thread at a time."""

    def __init__(self, reward: ModelReward, device: torch.device) -> None:
        """Load it, to where it was said to lie or to a device."""
        self.verifier, self._clip = judge_of(reward), reward.clip
        self.fingerprint = checksum_of(reward.model, reward.adapter)
        where = device_of(reward.device) if reward.device else device
        dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
        adapter = reward.adapter or None
        self._model = RewardModel.load(reward.model, adapter=adapter, device=where, dtype=dtype)
        # Each answer has a length of its own.
        self._model.decoder.expect_varied_shapes()
        if where.type == "cuda":
            torch.cuda.synchronize(where)  # who asks may have a stream of its own

    def judge(self, checks: Sequence[Check]) -> list[RewardPart]:
        """Return the parts of rewards that it gives."""
        began_s, vocab = time.perf_counter(), self._model.decoder.model.vocab
        # A policy of the same words may have rows for more than there are, and draw one of these.
        known = [max(check.job["tokens"]) < vocab for check in checks]
        read = [check.job["tokens"] for check, its in zip(checks, known, strict=True) if its]
        scores = iter(self._model.scores(read))
        took_s = (time.perf_counter() - began_s) / max(1, len(checks))
        return [
            self._part(check, next(scores) if its else None, took_s)
            for check, its in zip(checks, known, strict=True)
        ]

    def _part(self, check: Check, score: float | None, took_s: float) -> RewardPart:
        value, wrong = 0.0, ""
        if score is None:
            wrong = f"token {max(check.job['tokens'])} is none of its model's"
        elif not math.isfinite(score):
            wrong = f"its score is {score:.6g}"
        else:
            value = score
        if self._clip is not None:
            value = min(max(value, -self._clip), self._clip)
        if abs(check.weight * value) > LARGEST:
            wrong = f"its score is {value:g}, which is too much with a weight of {check.weight:g}"
            value = 0.0
        clipped = "" if score is None or value == score else f"its score is {score:.6g}"
        return RewardPart(
            name=check.name,
            value=value,
            weight=check.weight,
            reason=wrong or clipped,
            verifier=self.verifier,
            fingerprint=self.fingerprint,
            outcome="error" if wrong else "ok",
            took_s=took_s,
        )


def checksum_of(*folders: str) -> str:
    """Return a digest of weights and configurations, whatever their folders are called."""
    found = blake2b(digest_size=8)
    for folder in filter(None, folders):
        files = [each for each in sorted(Path(folder).iterdir()) if each.suffix in _WEIGHTS]
        if not files:
            raise InputError([Problem(folder, "holds no weights", "give a model's folder")])
        for file in files:
            found.update(f"{file.name} {file.stat().st_size}\n".encode())
            with file.open("rb") as opened:
                while part := opened.read(_AT_ONCE):
                    found.update(part)
    return found.hexdigest()
