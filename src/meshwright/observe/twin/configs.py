"""What `mw twin` tries on a GPU where nothing is asked for: shapes, formats and ways to recompute.

Nothing of a prediction was fitted to any of these steps.
"""

from typing import Any

from msgspec.structs import replace

from meshwright.observe.twin.alone import PURE, Config
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model

_SOME: dict[str, Any] = {"recompute": "selective", "recompute_ops": ("layernorm", "mlp_act")}
_MOST: dict[str, Any] = {"recompute": "selective", "recompute_ops": ("layernorm", "mlp")}
_FULL: dict[str, Any] = {"recompute": "full"}


def standard() -> tuple[Config, ...]:
    """Return configurations of 1B, 3B, 8B and mixtures of experts that 141 GB hold."""
    one, three, eight = (catalog.model(f"llama3.{name}") for name in ("2-1b", "2-3b", "1-8b"))
    few, many = catalog.model("olmoe-1b-7b"), _cut(catalog.model("qwen3-30b-a3b"), 6)
    return (
        _config(one, 8, 4096, **PURE),
        _config(one, 4, 8192),
        _config(one, 16, 2048, **_FULL),
        _config(one, 8, 4096, **PURE, precision="fp8-tensorwise"),
        _config(one, 4, 4096, batches=4),
        _config(three, 5, 4096, **PURE),
        _config(three, 4, 4096, **_SOME),
        _config(three, 4, 4096, **PURE, precision="fp8-rowwise"),
        _config(eight, 4, 4096, **PURE),
        _config(eight, 3, 4096, **PURE, precision="fp8-tensorwise"),
        _config(eight, 4, 8192, **PURE, **_FULL),
        _config(eight, 6, 4096, **PURE, **_MOST),
        _config(eight, 3, 4096, **PURE, precision="fp8-blockwise"),
        _config(few, 3, 4096, **PURE),
        _config(many, 4, 4096, **PURE),
    )


def _cut(model: Model, layers: int) -> Model:
    """Return the first layers of a model whose layers are all alike."""
    name = f"{model.name} cut to {layers} layers"
    return replace(model, name=name, pattern=f"{layers}*{model.blocks[0].name}")


def _config(
    model: Model, microbatch: int, length: int, *, batches: int = 1, **words: Any
) -> Config:
    layout = Layout(microbatch=microbatch, **words)
    return Config(model, layout, length, microbatch * batches)
