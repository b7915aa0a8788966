"""Reward models: a number for each answer, read from the hidden vector of its last token.

    model = RewardModel.load("path/of/model")
    model.rewards(examples)

The head is one row, `score.weight` as transformers calls it, in a file beside the model's weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.documents import Documents
from meshwright.run.nn.decoder import Decoder, Loss
from meshwright.run.nn.holding import Holding
from meshwright.run.parallel.spread import Spread
from meshwright.run.posttrain.adapters import load_adapter
from meshwright.run.posttrain.adapters.shards import gather
from meshwright.run.posttrain.data.prepared import Prepared
from meshwright.run.posttrain.objectives.preference import bradley_terry
from meshwright.run.posttrain.supervised.examples import Examples, numbers_of, places_of
from meshwright.run.posttrain.supervised.job import RecipeJob
from meshwright.run.posttrain.supervised.learner import ADAPTER, JudgingLearner, per_pair, summed
from meshwright.run.posttrain.supervised.settings import Reward
from meshwright.run.serve.model.load import load_served
from meshwright.run.train.data.batch import Batch

FILE = "reward_head.safetensors"
WEIGHT = "score.weight"


def rewards_of(x_BTD: Tensor, head_1D: Tensor, part: Batch) -> Tensor:
    """Return the reward of each answer of a batch from what the output head reads, fp32 [S]."""
    assert part.documents is not None
    last = part.documents.starts.long()[places_of(part) + 1] - 1
    return (x_BTD.flatten(0, 1)[last].float() @ head_1D.float().t()).squeeze(-1)


class RewardLearner(JudgingLearner):
    """A decoder, or an adapter beside it, with a head that gives rewards."""

    SEEN = ("pairs", "accuracy", "margin", "reward")

    def __init__(self, decoder: Decoder, job: RecipeJob, spread: Spread | None = None) -> None:
        super().__init__(decoder, job, spread)
        assert isinstance(job.recipe, Reward)
        self.recipe = job.recipe
        device = next(decoder.parameters()).device
        # From nought: all rewards are equal at first, and the first loss is log 2.
        self.head = nn.Parameter(torch.zeros(1, decoder.model.hidden, device=device))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Go through the parameters that are trained, the head last."""
        # The head of words gets no gradient; it stays as it is.
        yield from super().named_parameters()
        yield WEIGHT, self.head

    def trained(self, spread: Spread) -> Spread:
        """Return a model with the head to train too, on the ranks that have its end."""
        found = super().trained(spread)
        if not hasattr(self.decoder, "head"):
            return found
        mirrored = "mirror" if spread.mesh.layout.schedule == "dualpipe" else ""
        # Every rank reads the vectors of all tokens, so that its gradient is whole.
        held = replace(Holding.all_of(tuple(self.head.shape)), stages=mirrored)
        learning = dict(found.named_parameters()) | {WEIGHT: self.head}
        return found.training(learning, {WEIGHT: held}, {**found.used_with, WEIGHT: "head.weight"})

    def saved_as(self, name: str) -> str:
        """Name the head, or what else is trained."""
        return f"reward.{WEIGHT}" if name == WEIGHT else super().saved_as(name)

    def tensors(self) -> dict[str, Tensor]:
        """Return what a run that goes on needs."""
        return {**super().tensors(), f"reward.{WEIGHT}": self.head.data}

    def count(self, batch: Batch) -> int:
        """Return the pairs."""
        return len(numbers_of(batch)) // 2

    def judged(self, x_BTD: Tensor, part: Batch) -> Loss:
        """Return the summed loss of the pairs; the even answers are chosen, odd ones rejected."""
        rewards = self._rewards(x_BTD, part)
        chosen, rejected = rewards[0::2], rewards[1::2]
        self.see(
            pairs=torch.tensor(len(chosen), device=rewards.device),
            accuracy=(chosen > rejected).sum(),
            margin=(chosen - rejected).sum(),
            reward=rewards.sum() / 2,
        )
        return summed(bradley_terry(chosen, rejected, centre=self.recipe.centre))

    def _rewards(self, x_BTD: Tensor, part: Batch) -> Tensor:
        return self.decoder.read_head(lambda: rewards_of(x_BTD, self.head, part))

    def means(self, seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return figures per pair."""
        return per_pair(seen)

    def ended(self, folder: Path, *, speaks: bool = True) -> None:
        """Write the adapter with its head, where there is an adapter."""
        super().ended(folder, speaks=speaks)
        if self.adapter is None:
            return
        head: Tensor = self.head
        if self.spread is not None:
            lying = self.trained(self.spread)
            mine = {name: one for name, one in lying.named_parameters() if name == WEIGHT}
            shape = {WEIGHT: tuple(self.head.shape)}
            head = gather(lying, mine, shape, keep=True)[WEIGHT]
        if speaks:
            save_head(head, folder / ADAPTER)


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
            row = all_of.row(run, device)
            x_BTD = self.decoder.hidden(
                row.tokens_BT, positions=row.positions_BT, documents=row.documents
            )
            found += rewards_of(x_BTD, self.head, row).tolist()
        return found

    @torch.no_grad()
    def scores(self, answers: Sequence[Sequence[int]]) -> list[float]:
        """Return the rewards of prompts with their answers, each read by itself.

        The bits are those of `rewards` with one example at a time, and hang on nothing else.
        """
        device, found = self.head.device, list[Tensor]()
        for tokens in answers:
            documents = Documents.of_lengths([[len(tokens)]], device)
            positions = documents.positions(1, len(tokens))
            tokens_BT = torch.tensor([tokens], dtype=torch.int64, device=device)
            x_BTD = self.decoder.hidden(tokens_BT, positions=positions, documents=documents)
            found.append(x_BTD[0, -1:].float() @ self.head.float().t())
        # One wait for the device, behind all of them.
        return torch.cat(found).flatten().tolist() if found else []
