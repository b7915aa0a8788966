"""How often a reward model gives the chosen one of two answers more."""

from collections.abc import Sequence
from pathlib import Path

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.data.prepared import prepare
from meshwright.run.posttrain.evaluate.report import Report, Verdict, score_of
from meshwright.run.posttrain.supervised.reward import RewardModel
from meshwright.run.serve.model.words import load_words
from meshwright.run.train.data.selection import Split

LENGTH = 1 << 20
"""Positions that both answers of a pair may have together: what is scored is never cut."""


def preferred(
    model: str | Path,
    sources: Sequence[str | Path],
    *,
    adapter: str | Path | None = None,
    validation: float = 0.0,
    device: str = "auto",
) -> Report:
    """Score pairs, all of them or those that training held out.

    Each verdict has both rewards as its answers, the chosen one's first.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    split: Split = "validation" if validation else "train"
    pairs = prepare(
        sources, load_words(model), length=LENGTH, too_long="refuse", split=split,
        validation=validation,
    )  # fmt: skip
    if pairs.kind != "pairs":
        what = f"holds {pairs.kind}, and a reward model judges pairs"
        fix = "give records with chosen and rejected, and their prompt"
        raise InputError([Problem(pairs.records[0], what, fix)])
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    scorer = RewardModel.load(model, adapter=adapter, device=device, dtype=dtype)
    rewards = scorer.rewards(pairs)
    verdicts = [
        Verdict(
            where=where,
            task="choices",
            right=(chosen > other,),
            answers=(f"{chosen:.6g}", f"{other:.6g}"),
        )
        for where, chosen, other in zip(pairs.records, rewards[::2], rewards[1::2], strict=True)
    ]
    score = score_of("pairs preferred", [float(one.right[0]) for one in verdicts])
    return Report(scores=(score,), verdicts=tuple(verdicts))
