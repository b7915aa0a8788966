"""How often a reward model gives the chosen one of two answers more."""

from collections.abc import Sequence
from pathlib import Path

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.data.prepared_dataset import prepare_dataset
from meshwright.run.posttrain.evaluation.report import (
    EvaluationReport,
    QuestionResult,
    estimate_accuracy,
)
from meshwright.run.posttrain.supervised.reward_model import RewardModel
from meshwright.run.serve.tokenizer.tokenizer import load_tokenizer
from meshwright.run.train.data.document_split import SplitName

MAX_SCORED_LENGTH = 1 << 20
"""Positions that both answers of a pair may have together: what is scored is never cut."""


def score_preference_pairs(
    model: str | Path,
    sources: Sequence[str | Path],
    *,
    adapter: str | Path | None = None,
    validation: float = 0.0,
    device: str = "auto",
) -> EvaluationReport:
    """Score pairs, all of them or those that training held out.

    Each verdict has both rewards as its answers, the chosen one's first.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    split: SplitName = "validation" if validation else "train"
    pairs = prepare_dataset(
        sources,
        load_tokenizer(model),
        length=MAX_SCORED_LENGTH,
        length_policy="error",
        split=split,
        validation=validation,
    )
    if pairs.kind != "pairs":
        what = f"holds {pairs.kind}, and a reward model judges pairs"
        fix = "give records with chosen and rejected, and their prompt"
        raise InputError([Problem(pairs.sources[0], what, fix)])
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    scorer = RewardModel.load(model, adapter=adapter, device=device, dtype=dtype)
    rewards = scorer.score_examples(pairs)
    verdicts = [
        QuestionResult(
            where=where,
            task="choices",
            right=(chosen > other,),
            answers=(f"{chosen:.6g}", f"{other:.6g}"),
        )
        for where, chosen, other in zip(pairs.sources, rewards[::2], rewards[1::2], strict=True)
    ]
    score = estimate_accuracy("pairs preferred", [float(one.right[0]) for one in verdicts])
    return EvaluationReport(scores=(score,), results=tuple(verdicts))
