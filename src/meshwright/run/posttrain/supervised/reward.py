"""Reward models: a number for each answer, read from the hidden vector of its last token.

    model = RewardModel.load("path/of/model")
    model.rewards(examples)

The head is one row, `score.weight` as transformers calls it, in a file beside the model's weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from meshwright.errors import InputError, Problem
from meshwright.run.nn.decoder import Decoder, Loss
from meshwright.run.posttrain.adapters import load_adapter
from meshwright.run.posttrain.data.prepared import Prepared
from meshwright.run.posttrain.objectives.preference import bradley_terry
from meshwright.run.posttrain.supervised.examples import Examples, numbers_of, places_of
from meshwright.run.posttrain.supervised.job import RecipeJob
from meshwright.run.posttrain.supervised.learner import ADAPTER, RecipeLearner, per_pair, summed
from meshwright.run.posttrain.supervised.settings import Reward
from meshwright.run.serve.model.load import load_served
from meshwright.run.train.data.batch import Batch

FILE = "reward_head.safetensors"
WEIGHT = "score.weight"


def rewards_of(decoder: Decoder, head_1D: Tensor, part: Batch) -> Tensor:
    """Return the reward of each answer of a batch, fp32 [S]."""
    hidden_BTD = decoder.hidden(
        part.tokens_BT, positions=part.positions_BT, documents=part.documents
    )
    assert part.documents is not None
    last = part.documents.starts.long()[places_of(part) + 1] - 1
    return (hidden_BTD.flatten(0, 1)[last].float() @ head_1D.float().t()).squeeze(-1)


class RewardLearner(RecipeLearner):
    """A decoder, or an adapter beside it, with a head that gives rewards."""

    def __init__(self, decoder: Decoder, job: RecipeJob) -> None:
        super().__init__(decoder, job)
        assert isinstance(job.recipe, Reward)
        self.recipe = job.recipe
        weight = decoder.embedding.weight
        # From nought: all rewards are equal at first, and the first loss is log 2.
        self.head = nn.Parameter(torch.zeros(1, weight.shape[1], device=weight.device))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Go through the parameters that are trained, the head last."""
        # The head of words gets no gradient; it stays as it is.
        yield from super().named_parameters()
        yield WEIGHT, self.head

    def tensors(self) -> dict[str, Tensor]:
        """Return what a run that goes on needs."""
        return {**super().tensors(), f"reward.{WEIGHT}": self.head.data}

    def count(self, batch: Batch) -> int:
        """Return the pairs."""
        return len(numbers_of(batch)) // 2

    def loss(self, part: Batch) -> Loss:
        """Return the summed loss of the pairs; the even answers are chosen, odd ones rejected."""
        rewards = rewards_of(self.decoder, self.head, part)
        chosen, rejected = rewards[0::2], rewards[1::2]
        self.see(
            pairs=torch.tensor(len(chosen), device=rewards.device),
            accuracy=(chosen > rejected).sum(),
            margin=(chosen - rejected).sum(),
            reward=rewards.sum() / 2,
        )
        return summed(bradley_terry(chosen, rejected, centre=self.recipe.centre))

    def means(self, seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return figures per pair."""
        return per_pair(seen)

    def ended(self, folder: Path) -> None:
        """Write the adapter with its head, where there is an adapter."""
        super().ended(folder)
        if self.adapter is not None:
            save_head(self.head, folder / ADAPTER)


def save_head(head: Tensor, folder: Path) -> None:
    """Write a head beside the weights it belongs to."""
    weight = {WEIGHT: head.detach().cpu().contiguous()}
    save_file(weight, folder / f".{FILE}")
    (folder / f".{FILE}").replace(folder / FILE)


class RewardModel:
    """A model that gives rewards, in eval mode."""

    def __init__(self, decoder: Decoder, head_1D: Tensor) -> None:
        self.decoder, self.head = decoder, head_1D

    @staticmethod
    def load(
        model: str | Path,
        *,
        adapter: str | Path | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "RewardModel":
        """Load a model that `mw export` wrote, or a model with the adapter of a run."""
        folder = Path(model if adapter is None else adapter)
        if not (folder / FILE).is_file():
            what = f"holds no {FILE}, so it gives no rewards"
            fix = "export a run of mw train --recipe reward"
            raise InputError([Problem(str(folder), what, fix)])
        decoder = load_served(model, device=device, dtype=dtype)
        if adapter is not None:
            load_adapter(decoder, adapter).eval()
        head = load_file(folder / FILE)[WEIGHT]
        return RewardModel(decoder.eval(), head.to(device))

    @torch.no_grad()
    def rewards(self, examples: Prepared | Examples, *, most_tokens: int = 8192) -> list[float]:
        """Return the reward of every example in order, so many tokens at a time."""
        all_of = examples if isinstance(examples, Examples) else Examples([examples])
        device, found = self.head.device, list[float]()
        numbers: Sequence[int] = range(len(all_of))
        for run in all_of.rows(numbers, most_tokens):
            found += rewards_of(self.decoder, self.head, all_of.row(run, device)).tolist()
        return found
