"""What `mw twin` tries on a GPU where nothing is asked for: shapes, formats and ways to recompute.

Nothing of a prediction was fitted to any of these steps.
"""

from typing import Any

from msgspec.structs import replace

from meshwright.observe.twin.device_twin import PURE_BF16, TwinConfig
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model, build_decoder_model

_SOME: dict[str, Any] = {"recompute": "selective", "recompute_ops": ("layernorm", "mlp_act")}

_MOST: dict[str, Any] = {"recompute": "selective", "recompute_ops": ("layernorm", "mlp")}

_FULL: dict[str, Any] = {"recompute": "full"}


def build_default_gpu_configs() -> tuple[TwinConfig, ...]:
    """Return configurations of 1B, 3B, 8B and mixtures of experts that 141 GB hold."""
    one, three, eight = (catalog.get_model(f"llama3.{name}") for name in ("2-1b", "2-3b", "1-8b"))
    few, many = catalog.get_model("olmoe-1b-7b"), _cut(catalog.get_model("qwen3-30b-a3b"), 6)
    return (
        _config(one, 8, 4096, **PURE_BF16),
        _config(one, 4, 8192),
        _config(one, 16, 2048, **_FULL),
        _config(one, 8, 4096, **PURE_BF16, precision="fp8-tensorwise"),
        _config(one, 4, 4096, batches=4),
        _config(three, 5, 4096, **PURE_BF16),
        _config(three, 4, 4096, **_SOME),
        _config(three, 4, 4096, **PURE_BF16, precision="fp8-rowwise"),
        _config(eight, 4, 4096, **PURE_BF16),
        _config(eight, 3, 4096, **PURE_BF16, precision="fp8-tensorwise"),
        _config(eight, 4, 8192, **PURE_BF16, **_FULL),
        _config(eight, 6, 4096, **PURE_BF16, **_MOST),
        _config(eight, 3, 4096, **PURE_BF16, precision="fp8-blockwise"),
        _config(few, 3, 4096, **PURE_BF16),
        _config(many, 4, 4096, **PURE_BF16),
    )


def _cut(model: Model, layers: int) -> Model:
    """Return the first layers of a model whose layers are all alike."""
    name = f"{model.name} cut to {layers} layers"
    return replace(model, name=name, pattern=f"{layers}*{model.blocks[0].name}")


def _config(
    model: Model, microbatch: int, length: int, *, batches: int = 1, **words: Any
) -> TwinConfig:
    layout = Layout(microbatch=microbatch, **words)
    return TwinConfig(model, layout, length, microbatch * batches)


SEQ_LEN, NUM_SEQUENCES = 128, 8


def build_default_cpu_model() -> Model:
    """Return a model whose passes take tens of milliseconds on one core."""
    return build_decoder_model(
        "twin", layers=8, hidden=512, heads=8, kv_heads=4, ffn=1408, vocab=4096
    )


DEFAULT_LAYOUTS = (
    Layout(pp=2, schedule="gpipe"),
    Layout(pp=2, schedule="1f1b"),
    Layout(pp=2, schedule="interleaved", virtual_stages=2),
    Layout(pp=2, schedule="zb-h1"),
    Layout(pp=2, schedule="zb-v", virtual_stages=2),
    Layout(pp=2, schedule="dualpipe-v", virtual_stages=2),
    Layout(pp=2, schedule="1f1b", stage_layers=(5, 3)),
    Layout(pp=2, schedule="1f1b", recompute="full"),
    Layout(tp=2, sequence_parallel=True),
    Layout(cp=2),
    Layout(dp=2),
    Layout(dp=2, zero=1),
)
"""Two ranks each: every schedule that two stages can run, uneven stages, recompute, and every other
axis."""
