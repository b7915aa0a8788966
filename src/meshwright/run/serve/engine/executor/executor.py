"""`Executor`: what an engine asks of whatever carries its orders out."""

from typing import Protocol

from torch import Tensor

from meshwright.run.serve.engine.model_input import ModelInput
from meshwright.run.serve.engine.model_runner.model_runner import PendingOutput, StepLogits
from meshwright.run.serve.model.kv_cache import PagedKVCache
from meshwright.run.serve.model.lora import LoRAManager
from meshwright.run.serve.model.served_model import ServedModel
from meshwright.run.serve.sampling.sampled_logprobs import SampledLogprobs


class Executor(Protocol):
    """Carries out orders: the runner of one device, or of several that do the same."""

    model: ServedModel
    kv_cache: PagedKVCache
    """Of the first device."""
    lora_manager: LoRAManager | None
    tensor_parallel_size: int
    """Devices that have a part of each layer."""

    @property
    def prompt_logprobs(self) -> list[SampledLogprobs]:
        """How likely tokens of prompts were in the last step, part by part that was to tell."""

    def execute_model(self, orders: ModelInput) -> StepLogits | None:
        """Carry out everything but the drawing; None where nobody draws."""

    def sample_tokens(self, computed: StepLogits, mask_LW: Tensor | None = None) -> PendingOutput:
        """Draw a token for each line of what was computed."""
