"""`EngineConfig`: how an engine is set up on its devices."""

from typing import Literal, get_args

import msgspec

from meshwright.run.serve.kv_transfer.handle import KVTransport
from meshwright.spec.field_checks import FieldChecker, check_number
from meshwright.spec.scheduler_config import SchedulerConfig

ServedDtype = Literal["auto", "bf16", "fp16", "fp32"]
ServedWeightFormat = Literal["none", "fp8", "int4"]


DEFAULT_SPECULATIVE_TOKENS = 4
"""Tokens that a draft writes ahead where nobody says how many."""


class LoRASlotConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Room for one adapter, whose numbers come while an engine stands."""

    max_rank: int
    """Its highest rank."""
    dora: bool = False
    """Whether it changes the lengths of rows."""
    target_modules: tuple[str, ...] = ()
    """What it changes, by names from the layer on; all linear layers where none are named."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a model is served, in which numbers, and how much at a time."""

    device: str = "auto"
    """`cuda`, `cuda:1` or `cpu`; `auto` takes a GPU where there is one."""
    tensor_parallel_size: int = 1
    """Tensor parallel: GPUs of this machine, or processes, that share every product."""
    dtype: ServedDtype = "auto"
    """Numbers of weights and activations; `auto` is bf16 on a GPU and fp32 on a processor."""
    quantization: ServedWeightFormat = "none"
    """What matrices are kept in; `none` keeps them in `dtype`."""
    lora_modules: dict[str, str] = {}
    """LoRA adapters by the names that asks choose them by: folders of PEFT's."""
    max_lora_rank: int = 16
    """The highest rank of an adapter."""
    trained_lora_slot: LoRASlotConfig | None = None
    """For an adapter in training, which all answers are written with: nothing until it comes."""
    speculative_model: str = ""
    """Folder or file of a smaller model of the same words, which guesses the next tokens."""
    num_speculative_tokens: int = 0
    """Tokens that a step checks beside the next one: a draft's, or looked up in what came before.
    0 checks none, or 4 of a draft's."""
    kv_transfer_backend: KVTransport = "shm"
    """How keys and values go to other engines that are asked to go on."""
    scheduler_config: SchedulerConfig = SchedulerConfig()
    batch_invariant: bool = False
    """Give an answer the same bits whatever is computed beside it, at some cost of speed."""
    max_model_len: int | None = None
    """Tokens of a prompt with its answer; None is the model's context."""
    gpu_memory_utilization: float = 0.9
    """Share of the device's memory that the engine may have in all."""
    cuda_graphs: bool = True
    """Capture decoding steps in CUDA graphs."""
    random_weights: bool = False
    """Draw weights instead of reading them: for measuring, where only shapes matter."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.not_empty(device=self.device)
        bounds.one_of("dtype", self.dtype, get_args(ServedDtype))
        bounds.one_of("kv_transfer_backend", self.kv_transfer_backend, get_args(KVTransport))
        bounds.one_of("quantization", self.quantization, get_args(ServedWeightFormat))
        bounds.count(
            tensor_parallel_size=self.tensor_parallel_size,
            max_model_len=self.max_model_len,
            max_lora_rank=self.max_lora_rank,
        )
        bounds.count(0, num_speculative_tokens=self.num_speculative_tokens)
        bounds.problems += check_number(
            "gpu_memory_utilization", self.gpu_memory_utilization, 0.05, 1
        )
        if self.trained_lora_slot is not None and self.lora_modules:
            what = "all answers are written with the adapter in training"
            bounds.add("lora_modules", what, "leave them out, or trained_lora_slot")
        if self.scheduler_config.max_cudagraph_capture_size and not self.cuda_graphs:
            what = "steps with prompts are captured where graphs are"
            bounds.add("max_cudagraph_capture_size", what, "leave it out, or capture graphs")
        if self.scheduler_config.max_cudagraph_capture_size and self.batch_invariant:
            what = "where bits must not hang on the batch, one kernel reads all rows as they come"
            bounds.add("max_cudagraph_capture_size", what, "leave it out, or batch_invariant")
        bounds.raise_problems()
