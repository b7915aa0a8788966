"""`load_served`: a decoder with its weights, from a Hugging Face folder or a GGUF file."""

from pathlib import Path

import torch

from meshwright.run.nn.build import Options, build
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.huggingface import load
from meshwright.spec.model.huggingface import load_config


def load_served(
    path: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> Decoder:
    """Build the model that lies at a path and fill it, in `dtype` on `device`.

    Heads that predict further tokens are left out: an answer is written without them.
    """
    path = Path(path)
    model = load_config(path)
    decoder = build(model, device="meta", dtype=dtype, options=Options(multi_token=False))
    return load(decoder, path, device=device).eval().requires_grad_(False)
