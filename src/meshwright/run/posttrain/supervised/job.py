"""`RecipeJob`: a training job whose data are chats, and whose loss a recipe names."""

from typing import Any

import msgspec

from meshwright.errors import Problem
from meshwright.run.posttrain.adapters.settings import AdapterSettings
from meshwright.run.posttrain.supervised.layouts import layout_problems
from meshwright.run.posttrain.supervised.settings import ChatSettings, Recipe, name_of
from meshwright.run.train.job import Job
from meshwright.run.train.paths import whole_path
from meshwright.spec.bounds import Bounds


class RecipeJob(Job, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of a supervised recipe."""

    recipe: Recipe
    """What is minimised."""
    chats: ChatSettings = ChatSettings()
    """How records become tokens."""
    adapter: AdapterSettings | None = None
    """What is trained beside frozen weights; None trains every weight."""
    epochs: float | None = None
    """How often every record is trained on, in place of `workload.tokens`; 1 without either."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.positive(epochs=self.epochs)
        bounds.require()

    @property
    def words(self) -> str:
        """Where tokenizer and template lie."""
        return self.chats.words or self.start_from or ""

    @property
    def spreads(self) -> bool:
        """Whether ranks hold parts of the model; else each holds a whole replica."""
        layout = self.layout
        plain = name_of(self.recipe) == "sft" and self.adapter is None
        return plain or layout.dp != layout.gpus or layout.zero > 0 or layout.ep > 1

    def check(self) -> tuple[Problem, ...]:
        """Return everything that keeps this job from running, with fixes."""
        return (*super().check(), *self._own_problems())

    def _own_problems(self) -> list[Problem]:
        found, kind = [], name_of(self.recipe)
        if self.workload.packing == "concat":
            what = "concat lets chats read each other"
            found.append(Problem("workload.packing", what, 'use "pack", or "none"'))
        if self.chats.too_long == "split" and kind not in ("sft", "lora", "dora"):
            what = f"{kind} judges answers as a whole"
            found.append(Problem("chats.too_long", what, "use cut, drop or refuse"))
        if self.adapter is not None:
            found += layout_problems(self.model, self.layout, self.adapter)
        if self.adapter is not None and self.start_from is None:
            what = "an adapter stands beside weights that a run begins with"
            found.append(Problem("start_from", what, "name a model's folder or GGUF file"))
        if self.optimizer.average is not None and (kind != "sft" or self.adapter is not None):
            what = "an average is kept of whole models trained by sft alone"
            found.append(Problem("optimizer.average", what, "leave it out"))
        return found

    def flops_per_token(self, length: int) -> float:
        """Return the least that training on one token takes: frozen weights get no gradient."""
        every = super().flops_per_token(length)
        return every if self.adapter is None else every * 2 / 3

    def kept(self) -> dict[str, Any]:
        """Return what more may not change while a run goes on."""
        words = self.words and whole_path(self.words)
        return {
            "recipe": msgspec.to_builtins(self.recipe),
            "adapter": None if self.adapter is None else msgspec.to_builtins(self.adapter),
            "chats": {"words": words},
        }
