"""Small models of transformers beside the same as decoders of ours, and adapters that do a lot."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.huggingface import load_hf_checkpoint
from meshwright.run.posttrain.lora import DecoderAdapter
from tests.run.nn.huggingface.drawn import draw
from tests.run.nn.huggingface.reference import reference

LLAMA: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 96, "intermediate_size": 48, "num_hidden_layers": 2,
    "max_position_embeddings": 64, "attention_bias": True,
}  # fmt: skip


def both(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    """Return a model of transformers, and the decoder of the same weights."""
    theirs = reference(family, LLAMA if family == "llama" else draw(family, 0))
    theirs.save_pretrained(folder / "base")
    return theirs, load_hf_checkpoint(None, folder / "base", dtype=dtype)


def ours(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32) -> Decoder:
    decoder: Decoder = both(folder, family, dtype)[1]
    return decoder


def stir(adapter: DecoderAdapter, seed: int = 3) -> None:
    """Give every parameter numbers that show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in adapter.named_parameters():
            noise = torch.randn(value.shape, generator=generator).to(value)
            if "magnitude" in name:
                value.mul_(1 + 0.2 * noise)
            else:
                value.copy_(noise / 4)


def tokens(vocab: int, seed: int = 0) -> Tensor:
    return torch.randint(0, vocab, (2, 11), generator=torch.Generator().manual_seed(seed))


def far(one: Tensor, other: Tensor) -> float:
    """Return how far two tensors are apart, as a share of their size."""
    return float((one - other).detach().norm() / other.detach().norm())
