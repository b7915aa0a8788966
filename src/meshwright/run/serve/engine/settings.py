"""`EngineSettings`: how an engine is set up on its devices."""

from typing import Literal, get_args

import msgspec

from meshwright.run.serve.parcels import Way
from meshwright.spec.bounds import Bounds, real
from meshwright.spec.serving import Limits

Precision = Literal["auto", "bf16", "fp16", "fp32"]
WeightFormat = Literal["model", "fp8", "int4"]


GUESSES = 4
"""Tokens that a draft writes ahead where nobody says how many."""


class AdapterRoom(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Room for one adapter, whose numbers come while an engine stands."""

    rank: int
    """Its highest rank."""
    dora: bool = False
    """Whether it changes the lengths of rows."""
    modules: tuple[str, ...] = ()
    """What it changes, by names from the layer on; all linear layers where none are named."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a model is served, in which numbers, and how much at a time."""

    device: str = "auto"
    """`cuda`, `cuda:1` or `cpu`; `auto` takes a GPU where there is one."""
    tp: int = 1
    """Tensor parallel: GPUs of this machine, or processes, that share every product."""
    precision: Precision = "auto"
    """Numbers of weights and activations; `auto` is bf16 on a GPU and fp32 on a processor."""
    weights: WeightFormat = "model"
    """What matrices are kept in."""
    adapters: dict[str, str] = {}
    """LoRA adapters by the names that asks choose them by: folders of PEFT's."""
    adapter_rank: int = 16
    """The highest rank of an adapter."""
    own_adapter: AdapterRoom | None = None
    """For an adapter in training, which all answers are written with: nothing until it comes."""
    draft: str = ""
    """Folder or file of a smaller model of the same words, which guesses the next tokens."""
    guesses: int = 0
    """Tokens that a step checks beside the next one: a draft's, or looked up in what came before.
    0 checks none, or 4 of a draft's."""
    parcels: Way = "shm"
    """How keys and values go to other engines that are asked to go on."""
    limits: Limits = Limits()
    invariant: bool = False
    """Give an answer the same bits whatever is computed beside it, at some cost of speed."""
    max_length: int | None = None
    """Tokens of a prompt with its answer; None is the model's context."""
    memory_share: float = 0.9
    """Share of the device's memory that the engine may have in all."""
    graphs: bool = True
    """Capture decoding steps in CUDA graphs."""
    random_weights: bool = False
    """Draw weights instead of reading them: for measuring, where only shapes matter."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.named(device=self.device)
        bounds.one_of("precision", self.precision, get_args(Precision))
        bounds.one_of("parcels", self.parcels, get_args(Way))
        bounds.one_of("weights", self.weights, get_args(WeightFormat))
        bounds.count(tp=self.tp, max_length=self.max_length, adapter_rank=self.adapter_rank)
        bounds.count(0, guesses=self.guesses)
        bounds.problems += real("memory_share", self.memory_share, 0.05, 1)
        if self.own_adapter is not None and self.adapters:
            what = "all answers are written with the adapter in training"
            bounds.add("adapters", what, "leave them out, or own_adapter")
        if self.limits.graph_tokens and not self.graphs:
            what = "steps with prompts are captured where graphs are"
            bounds.add("graph_tokens", what, "leave it out, or capture graphs")
        if self.limits.graph_tokens and self.invariant:
            what = "where bits must not hang on the batch, one kernel reads all rows as they come"
            bounds.add("graph_tokens", what, "leave it out, or invariant")
        bounds.require()
