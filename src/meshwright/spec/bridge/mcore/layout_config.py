"""A `Layout` in Megatron-Core's settings, and back; the reasons for what they cannot hold."""

from typing import Any

from msgspec.structs import replace

from meshwright.errors import Problem
from meshwright.spec.bridge.export_report import Reasons, read_layout
from meshwright.spec.bridge.framework_config import FrameworkConfig
from meshwright.spec.bridge.mcore import (
    model_config,
    parallelism,
    pipeline_layout,
    precision,
    recompute,
)
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.model import Model

SETTINGS = tuple(
    dict.fromkeys(
        [
            *parallelism.SETTINGS,
            *pipeline_layout.SETTINGS,
            *precision.SETTINGS,
            *recompute.SETTINGS,
            *model_config.SETTINGS,
        ]
    )
)
"""Every setting that is written or read."""


def write_layout(
    layout: Layout, architecture: Model | None, sequence_length: int | None
) -> dict[str, Any]:
    """Return the settings of a layout and a model, the ones that are off included."""
    settings = {
        **parallelism.write_parallelism(layout),
        **pipeline_layout.write_pipeline(layout, architecture),
        **recompute.write_recompute(layout, architecture),
        **precision.write_precision(layout, architecture),
        "seq_length": sequence_length,
    }
    if architecture is not None:
        settings |= model_config.write_model(architecture, layout)
        if settings.get("hybrid_layer_pattern"):
            # Bars in the pattern say both, and Megatron refuses to be told twice.
            settings["virtual_pipeline_model_parallel_size"] = None
            settings["pipeline_model_parallel_layout"] = None
    return settings


def with_offload(layout: Layout, architecture: Model | None) -> Layout:
    """Return the layout with a number of offloaded layers where it means as many as can be."""
    layers = precision.count_offloaded_layers(layout, architecture)
    if layout.offload_layers is not None or layers is None:
        return layout
    return replace(layout, offload_layers=layers)


def list_assumptions(layout: Layout, settings: dict[str, Any]) -> tuple[Problem, ...]:
    """List what Megatron-Core wants to be told and the layout leaves open."""
    found = []
    sizes = settings.get("hierarchical_context_parallel_sizes")
    if sizes is not None and layout.cp > 1:
        found.append(
            Problem("layout.cp_kind", f"all-to-all over {sizes[0]} and a ring over {sizes[1]} GPUs",
                    "change the two sizes to fit the nodes")
        )  # fmt: skip
    if settings.get("cpu_offloading_num_layers") and layout.offload_layers is None:
        count = settings["cpu_offloading_num_layers"]
        found.append(Problem("layout.offload", f"activations of {count} layers go to the host"))
    return tuple(found)


def read_mcore_layout(settings: FrameworkConfig, gpus: int | None) -> Layout:
    """Return the layout, or raise everything that is wrong with the settings."""
    pipeline = pipeline_layout.read_pipeline(settings)
    pp, virtual = pipeline["pp"], pipeline.get("virtual_stages", 1)
    fields = parallelism.read_parallelism(settings, gpus, pp)
    fields |= pipeline
    fields |= recompute.read_recompute(settings, pp, virtual, fields["zero"])
    fields |= precision.read_precision(settings)
    settings.raise_problems()
    origin = {field: settings.label(key) for field, key in _ORIGIN.items()}
    return read_layout(fields, origin)


_ORIGIN = {
    "ep": "expert_model_parallel_size",
    "expert_tp": "expert_tensor_parallel_size",
    "global_batch": "global_batch_size",
    "microbatch": "micro_batch_size",
    "shard": "num_distributed_optimizer_instances",
    "stage_layers": "pipeline_model_parallel_layout",
    "virtual_stages": "virtual_pipeline_model_parallel_size",
    "recompute_layers": "recompute_num_layers",
    "offload_layers": "cpu_offloading_num_layers",
}


REASONS: Reasons = {
    "recompute_ops": (
        "Megatron-Core recomputes the modules it names, and core_attn where none is named",
        "use core_attn, layernorm, mlp, mla_up_proj, moe, moe_act or shared_experts",
    ),
    "recompute": ("none of the operations is a module that Megatron-Core can recompute", ""),
    "recompute_layers": (
        "the number of layers belongs to full recompute", "use recompute=full, or leave it out"),
    "schedule": (
        "Megatron-Core runs 1f1b with one chunk per rank and interleaved 1f1b with several",
        "use 1f1b with virtual_stages=1, or interleaved with more"),
    "overlap_pp": (
        "Megatron-Core overlaps sends exactly when chunks are interleaved over more than two "
        "stages, or always with two", "use virtual_stages above 1"),
    "overlap_parameters": (
        "parameters are gathered ahead only together with overlapped gradients",
        "set overlap_gradients too"),
    "overlap_tp": ("it needs sequence parallelism", "set sequence_parallel"),
    "overlap_ep": (
        "it needs experts over several GPUs, interleaved chunks when there is a pipeline, half "
        "precision, and neither full recompute nor recompute of moe", "drop overlap_ep"),
    "zero": (
        "stages 2 and 3 are Megatron-FSDP, which takes only adamw and sgd", "use zero=1"),
    "shard": (
        "the experts' data-parallel group does not divide by the same number of instances",
        "use a larger shard"),
    "order": (
        "ranks are ordered tp-cp-ep-dp-pp, or tp-cp-ep-pp-dp", "use one of these two"),
    "precision": ("there is no such FP8 recipe", "use fp8-blockwise or fp8-tensorwise"),
    "master_precision": (
        "the optimizer keeps fp32 weights, or fp16 with adamw and zero of at least 1",
        "use fp32"),
    "gradient_precision": (
        "gradients are summed in fp32 or in the dtype of the weights", "use fp32"),
    "moment_precision": (
        "moments other than fp32 need adamw and zero of at least 1; int8 is not known", "use fp32"),
    "offload": (
        "only the optimizer (adamw, zero of at least 1) and, without pipeline and recompute, the "
        "activations of offload_layers, or of all but the last layer of a given model, can be "
        "kept on the host", ""),
    "offload_layers": (
        "activations are offloaded without pipeline and recompute, and never those of the last "
        "layer", ""),
    # The model.
    "*": ("all layers of a kind are built from one set of sizes, of which this is not one", ""),
    "vocab": ("the table is padded so that tensor parallelism divides it", "use a divisible size"),
    "qk_norm": ("queries and keys are normed per head, or not", ""),
    "chunk": ("there is no chunked attention", ""),
    "softcap": ("there is no soft cap", ""),
    "scale": ("the score scale follows the width of a head", ""),
    "theta": ("all layers share one rotary base, a whole number", ""),
    "interleaved": ("latent attention always pairs neighbours", ""),
    "norms": ("every block norms before its parts", ""),
    "positions": ("they are learned, none, or rotary where attention has rotary settings", ""),
    "multi_token": ("heads need rotary positions of the plain kind, or none", ""),
    "head_bias": ("the output head has no bias", ""),
    "vision": ("the flags of a language model describe no tower", ""),
    "embedding_scale": ("embeddings are not scaled", ""),
    "embedding_norm": ("no norm follows the embedding", ""),
    "logit_softcap": ("there is no soft cap", ""),
    "position_offset": ("learned tables have no unused rows", ""),
    "final_norm": ("the final norm cannot be left out", ""),
    "out_bias": ("one switch gives biases to all GEMMs", ""),
    "mlp.bias": ("one switch gives biases to all GEMMs", ""),
    "router_bias": (
        "it follows the switch for all GEMMs, or balances sigmoid scores", ""),
    "normalise": ("weights sum to one, but for softmax before choosing and a single expert", ""),
    "qkv_bias": ("one switch gives biases to all GEMMs", ""),
    "norm.bias": ("layer norms have a bias and RMS norms have none", ""),
    "norm.kind": ("norms are LayerNorm or RMSNorm", ""),
    "activation": ("all layers share one activation that has a name there", ""),
    "gated": ("all layers share one activation that has a name there", ""),
    "pattern": ("hybrid models count a mixer and a feed-forward part as two layers", ""),
    "causal": ("language models are causal", ""),
}  # fmt: skip
"""Why Megatron-Core cannot say a field, and what to do."""
