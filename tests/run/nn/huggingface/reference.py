"""transformers' models as the reference: built small, with weights that leave no default.

Weights that a class starts from (norms of one, biases of nought) would hide a part that is read
from the wrong place, so every parameter gets random numbers.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="needs transformers as the reference")
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

LENGTH = 37
"""Positions of a test's sequences: more than any window, and than the context most are made for."""


def reference(family: str, config: dict[str, Any], auto: str = "AutoModelForCausalLM") -> Any:
    """Build a model of transformers with random weights, deterministically."""
    torch.manual_seed(0)
    model = getattr(transformers, auto).from_config(
        transformers.AutoConfig.for_model(family, **config),
        dtype=torch.float32,
        # The others leave out what they cannot do, such as caps of the scores.
        attn_implementation="eager",
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if name.endswith(("A_log", "dt_bias")):
                # States that last for many tokens; steps far above the least of Nemotron-H's code.
                parameter.copy_(0.2 * noise - (2 if name.endswith("A_log") else 0))
            elif "norm" in name or "ln_" in name or parameter.dim() < 2:
                parameter.add_(0.2 * noise)
            else:
                # Keeps the scale of what passes, so that every layer shows in the logits.
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
    return model.eval()


def tokens_of(model: Any, batch: int = 2, length: int = LENGTH) -> Tensor:
    """Draw tokens for a model."""
    return torch.randint(0, model.config.vocab_size, (batch, length))


@torch.no_grad()
def logits_of(model: Any, tokens_BT: Tensor) -> Tensor:
    """Return the logits of a model of transformers."""
    logits: Tensor = model(tokens_BT, use_cache=False).logits
    return logits


def opened(folder: Path) -> Any:
    """Open a folder with transformers, which has to find every weight it wants and no more."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, local_files_only=True, attn_implementation="eager"
    )
    amiss = {kind: found for kind, found in info.items() if found}
    assert not amiss, amiss
    return model.eval()
