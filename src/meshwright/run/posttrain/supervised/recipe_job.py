"""`RecipeJob`: a training job whose data are chats, and whose loss a recipe names."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import msgspec

from meshwright.errors import Problem
from meshwright.run.posttrain.lora.lora_config import AdapterConfig
from meshwright.run.posttrain.supervised.recipe_config import (
    ChatDataConfig,
    Recipe,
    get_recipe_name,
)
from meshwright.run.train.job.train_job import TrainJob
from meshwright.run.train.run_folder.paths import make_absolute_path
from meshwright.spec.field_checks import FieldChecker
from meshwright.spec.layout import Layout
from meshwright.spec.layout.pipeline_chunks import list_chunks_by_rank
from meshwright.spec.model import Model


def find_adapter_layout_problems(
    model: Model, layout: Layout, adapter: AdapterConfig
) -> Iterator[Problem]:
    """Yield what keeps an adapter from being trained under a layout, each with a fix."""
    if layout.precision == "fp16":
        what = "adapters are not trained beside fp16 weights"
        yield Problem("layout.precision", what, "use bf16 or fp32")
    if layout.zero in (1, 2):
        what = f"ZeRO {layout.zero} cuts what an optimizer keeps, of which an adapter has little"
        yield Problem("layout.zero", what, "use 3, which cuts the frozen weights, or 0")
    if layout.tp > 1 and layout.overlap_tp:
        what = "GEMMs with an adapter are not split into chunks that overlap with collectives"
        yield Problem("layout.overlap_tp", what, "leave it out")
    if layout.pp * layout.cp > 1 and adapter.dropout:
        axis = "pp" if layout.pp > 1 else "cp"
        what = f"under layout.{axis} other inputs would be left out than on one device"
        yield Problem("adapter.dropout", what, f"use 0, or layout.tp in place of layout.{axis}")
    if layout.optimizer == "muon" and layout.tp > 1:
        what = "Muon makes whole matrices of a model's own parts alone, not of an adapter's"
        yield Problem("layout.optimizer", what, "use adamw, or no tp")
    yield from _idle_stages(model, layout, adapter)


def _idle_stages(model: Model, layout: Layout, adapter: AdapterConfig) -> Iterator[Problem]:
    """Find stages without a layer that the adapter's targets name."""
    # A login node that only writes a job may lack torch; the ranks look again.
    if layout.pp == 1 or find_spec("torch") is None:
        return
    from meshwright.run.nn.decoder_builder import build_decoder
    from meshwright.run.posttrain.lora.decoder_adapter import find_adapted_layers

    chosen = find_adapted_layers(build_decoder(model), adapter.to_lora_config())
    for rank, chunks in enumerate(list_chunks_by_rank(layout, model.layers)):
        held = {index for chunk in chunks for index in range(chunk.first, chunk.last)}
        if chosen and not held & chosen:
            what = f"pipeline rank {rank} has no layer that {adapter.target_modules!r} names"
            yield Problem(
                "adapter.target_modules", what, "name modules of every stage, or use less pp"
            )


class RecipeJob(TrainJob, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of a supervised recipe."""

    recipe: Recipe
    """What is minimised."""
    chats: ChatDataConfig = ChatDataConfig()
    """How records become tokens."""
    adapter: AdapterConfig | None = None
    """What is trained beside frozen weights; None trains every weight."""
    epochs: float | None = None
    """How often every record is trained on, in place of `workload.tokens`; 1 without either."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.positive(epochs=self.epochs)
        bounds.raise_problems()

    @property
    def tokenizer_path(self) -> str:
        """Where tokenizer and template lie."""
        return self.chats.tokenizer or self.initial_load_path or ""

    @property
    def shards_model(self) -> bool:
        """Whether ranks hold parts of the model; else each holds a whole replica."""
        layout = self.layout
        plain = get_recipe_name(self.recipe) == "sft" and self.adapter is None
        return plain or layout.dp != layout.gpus or layout.zero > 0 or layout.ep > 1

    def check(self) -> tuple[Problem, ...]:
        """Return everything that keeps this job from running, with fixes."""
        return (*super().check(), *self._own_problems())

    def _own_problems(self) -> list[Problem]:
        found, kind = [], get_recipe_name(self.recipe)
        if self.workload.packing == "concat":
            what = "concat lets chats read each other"
            found.append(Problem("workload.packing", what, 'use "pack", or "none"'))
        if self.chats.length_policy == "split" and kind not in ("sft", "lora", "dora"):
            what = f"{kind} judges answers as a whole"
            found.append(Problem("chats.length_policy", what, "use truncate, drop or error"))
        if self.adapter is not None:
            found += find_adapter_layout_problems(self.model, self.layout, self.adapter)
        if self.adapter is not None and self.initial_load_path is None:
            what = "an adapter stands beside weights that a run begins with"
            found.append(Problem("initial_load_path", what, "name a model's folder or GGUF file"))
        if self.optimizer.ema_decay is not None and (kind != "sft" or self.adapter is not None):
            what = "an average is kept of whole models trained by sft alone"
            found.append(Problem("optimizer.ema_decay", what, "leave it out"))
        return found

    def flops_per_token(self, length: int) -> float:
        """Return the least that training on one token takes: frozen weights get no gradient."""
        every = super().flops_per_token(length)
        return every if self.adapter is None else every * 2 / 3

    def resume_invariants(self) -> dict[str, Any]:
        """Return what more may not change while a run goes on."""
        words = self.tokenizer_path and make_absolute_path(self.tokenizer_path)
        return {
            "recipe": msgspec.to_builtins(self.recipe),
            "adapter": None if self.adapter is None else msgspec.to_builtins(self.adapter),
            "chats": {"tokenizer": words},
        }
