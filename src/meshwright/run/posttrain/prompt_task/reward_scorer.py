"""`CombinedRewardProvider`: verifiers and reward models as one, which score every check."""

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from hashlib import blake2b
from pathlib import Path

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.prompt_task.prompt_environment import make_reward_model_key
from meshwright.run.posttrain.prompt_task.reward_config import ModelReward
from meshwright.run.posttrain.rollout.reward_component import RewardComponent
from meshwright.run.posttrain.rollout.verifiers.verifier_job import VerifierJob
from meshwright.run.posttrain.rollout.verifiers.verifier_outcome import MAX_REWARD
from meshwright.run.posttrain.rollout.verifiers.verifier_pool import VerifierPool
from meshwright.run.posttrain.supervised.reward_model import HEAD_FILE, RewardModel
from meshwright.run.serve.engine.runner_builder import resolve_device
from meshwright.run.serve.tokenizer.tokenizer import Tokenizer, load_tokenizer
from meshwright.spec.model.huggingface import load_config

_WEIGHTS = frozenset({".safetensors", ".json"})

_AT_ONCE = 1 << 24


def find_reward_model_problems(
    reward: ModelReward, tokenizer: Tokenizer, longest: int
) -> Iterator[Problem]:
    """Say why a reward model cannot judge answers of a policy, from its files alone.

    `longest` is what a prompt with its answer may have, `tokenizer` that of the policy.
    """
    folder = Path(reward.adapter or reward.model)
    if not (folder / HEAD_FILE).is_file():
        where, fix = "model", "export a run of mw train --recipe reward"
        if reward.adapter:
            where, fix = "adapter", "give RUN/adapter of a run of mw train --recipe reward"
        yield Problem(where, f"{folder} holds no {HEAD_FILE}, so it gives no rewards", fix)
        return
    if not (Path(reward.model) / "config.json").is_file():
        what = f"{reward.model} holds no config.json, so it is no whole model"
        fix = (
            "write one with mw convert RUN FOLDER --merge-adapter, or name its model, and it as "
            "adapter"
        )
        yield Problem("model", what, fix)
        return
    try:
        resolve_device(reward.device or "cpu")
    except InputError as error:
        yield from error.problems
    theirs, ours = (
        load_tokenizer(reward.model).backend_tokenizer.get_vocab(),
        tokenizer.backend_tokenizer.get_vocab(),
    )
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
        self.verifier, self._clip = make_reward_model_key(reward), reward.clip
        self.fingerprint = compute_reward_model_digest(reward.model, reward.adapter)
        where = resolve_device(reward.device) if reward.device else device
        dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
        adapter = reward.adapter or None
        self._model = RewardModel.load(reward.model, adapter=adapter, device=where, dtype=dtype)
        # Each answer has a length of its own.
        self._model.decoder.set_dynamic_shapes()
        if where.type == "cuda":
            torch.cuda.synchronize(where)  # who asks may have a stream of its own

    def score(self, checks: Sequence[VerifierJob]) -> list[RewardComponent]:
        """Return the parts of rewards that it gives."""
        began_s, vocab = time.perf_counter(), self._model.decoder.model.vocab
        # A policy of the same words may have rows for more than there are, and draw one of these.
        known = [max(check.payload["tokens"]) < vocab for check in checks]
        read = [check.payload["tokens"] for check, its in zip(checks, known, strict=True) if its]
        scores = iter(self._model.score_completions(read))
        took_s = (time.perf_counter() - began_s) / max(1, len(checks))
        return [
            self._part(check, next(scores) if its else None, took_s)
            for check, its in zip(checks, known, strict=True)
        ]

    def _part(self, check: VerifierJob, score: float | None, took_s: float) -> RewardComponent:
        value, wrong = 0.0, ""
        if score is None:
            wrong = f"token {max(check.payload['tokens'])} is none of its model's"
        elif not math.isfinite(score):
            wrong = f"its score is {score:.6g}"
        else:
            value = score
        if self._clip is not None:
            value = min(max(value, -self._clip), self._clip)
        if abs(check.weight * value) > MAX_REWARD:
            wrong = f"its score is {value:g}, which is too much with a weight of {check.weight:g}"
            value = 0.0
        clipped = "" if score is None or value == score else f"its score is {score:.6g}"
        return RewardComponent(
            name=check.name,
            value=value,
            weight=check.weight,
            reason=wrong or clipped,
            verifier=self.verifier,
            fingerprint=self.fingerprint,
            outcome="error" if wrong else "ok",
            duration_s=took_s,
        )


def compute_reward_model_digest(*folders: str) -> str:
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


class CombinedRewardProvider:
    """A pool of verifiers with reward models beside it."""

    def __init__(self, pool: VerifierPool, scorers: Sequence[RewardScorer]) -> None:
        """Let models score where somebody asks them, while verifiers work in their processes."""
        self._pool, self._scorers = pool, {each.verifier: each for each in scorers}
        told = {each.verifier: each.fingerprint for each in scorers}
        self.fingerprints = {**pool.fingerprints, **told}
        """Of the verifiers' modules, and checksums of the models."""

    def submit(self, checks: Sequence[VerifierJob]) -> "list[Future[RewardComponent]]":
        """Judge checks; each verdict comes as a part of a reward, also where it fails."""
        others = [check for check in checks if check.verifier not in self._scorers]
        verdicts = iter(self._pool.submit(others))
        scored: dict[str, list[VerifierJob]] = {}
        for check in checks:
            if check.verifier in self._scorers:
                scored.setdefault(check.verifier, []).append(check)
        parts = {who: iter(self._scorers[who].score(mine)) for who, mine in scored.items()}
        return [
            _known(next(parts[check.verifier])) if check.verifier in parts else next(verdicts)
            for check in checks
        ]


def _known(part: RewardComponent) -> "Future[RewardComponent]":
    found: Future[RewardComponent] = Future()
    found.set_result(part)
    return found
