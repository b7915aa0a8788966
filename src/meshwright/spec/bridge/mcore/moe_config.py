"""Dense and routed feed-forward parts in Megatron-Core's settings.

The activation is written as Megatron-Core holds it (a function and a gate); the flags of
Megatron-LM that stand for some of these pairs are in `megatron`.
"""

from typing import Any

from meshwright.errors import InputError
from meshwright.spec.bridge.framework_config import FrameworkConfig
from meshwright.spec.model.feedforward import Activation, FeedForward, MLPSpec, MoESpec

SETTINGS = (
    "ffn_hidden_size",
    "activation_func",
    "gated_linear_unit",
    "glu_linear_offset",
    "activation_func_clamp_value",
    "bias_activation_fusion",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_latent_size",
    "moe_grouped_gemm",
    "moe_token_dispatcher_type",
)

# megatron/bridge/utils/activation_map.py gives these names to Megatron-Core's functions.
_FUNCTIONS: dict[Activation, str] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu-tanh": "fast_gelu",
    "quick-gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "squared_relu",
    # gpt-oss: a gated quick GELU whose inputs are clamped at 7 and whose linear half adds 1.
    "swiglu-clamped": "quick_gelu",
}
_FUNCTIONS_BACK: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "fast_gelu": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "quick_gelu": "quick-gelu",
    "relu": "relu",
    "squared_relu": "relu2",
    "relu2": "relu2",
    "torch.nn.functional.silu": "silu",
    "torch.nn.functional.gelu": "gelu",
    "torch.nn.functional.relu": "relu",
}
_CLAMP = 7.0


def write_activation(part: FeedForward, biased: bool) -> dict[str, Any]:
    """Return the settings of the non-linearity, which the whole model shares."""
    clamped = part.activation == "swiglu-clamped" and part.gated
    function = _FUNCTIONS[part.activation]
    return {
        "activation_func": function,
        "gated_linear_unit": part.gated,
        # Fused with a bias, Megatron-Core's plain GELU becomes its tanh form, and other plain
        # functions are refused.
        "bias_activation_fusion": False if biased and not part.gated else None,
        "glu_linear_offset": 1.0 if clamped else None,
        "activation_func_clamp_value": _CLAMP if clamped else None,
    }


def write_moe(experts: MoESpec) -> dict[str, Any]:
    """Return the settings of routed layers."""
    grouped = experts.groups > 1
    return {
        "num_experts": experts.count,
        "moe_ffn_hidden_size": experts.width,
        "moe_router_topk": experts.top_k,
        "moe_shared_expert_intermediate_size": experts.shared_width or None,
        "moe_shared_expert_gate": experts.shared_gate and experts.shared_width > 0,
        "moe_router_score_function": experts.scoring,
        # Softmax over the chosen experts sums to one; softmax before choosing does not, and is
        # the only one Megatron-Core takes for a single expert.
        "moe_router_pre_softmax": (
            experts.scoring == "softmax" and (not experts.normalise or experts.top_k == 1)
        ),
        "moe_router_topk_scaling_factor": experts.scale if experts.scale != 1.0 else None,
        "moe_router_enable_expert_bias": (
            experts.router_bias == "balance" and experts.scoring == "sigmoid"
        ),
        "moe_router_num_groups": experts.groups if grouped else None,
        "moe_router_group_topk": experts.groups_used if grouped else None,
        "moe_latent_size": experts.latent,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }


def read_activation(settings: FrameworkConfig) -> dict[str, Any]:
    """Return `activation` and `gated` for every feed-forward part."""
    activation = settings.choice("activation_func", _FUNCTIONS_BACK, "gelu")
    gated = settings.flag("gated_linear_unit")
    clamp = settings.optional_number("activation_func_clamp_value")
    offset = settings.number("glu_linear_offset", 0.0)
    if activation == "quick-gelu" and gated and (clamp, offset) == (_CLAMP, 1.0):
        return {"activation": "swiglu-clamped", "gated": True}
    if clamp is not None:
        settings.add_note("activation_func_clamp_value", f"a clamp at {clamp} cannot be held here")
    elif offset:
        settings.add_note("glu_linear_offset", f"an offset of {offset} cannot be held here")
    return {"activation": activation, "gated": gated}


def read_mlp(settings: FrameworkConfig, hidden: int) -> MLPSpec:
    """Return the dense part."""
    activation = read_activation(settings)
    # megatron/training/arguments.py: 4 × width, or two thirds of it in steps of 64 when gated.
    usual = max(64, 4 * hidden * 2 // 3 // 64 * 64) if activation["gated"] else 4 * hidden
    width = settings.integer("ffn_hidden_size", usual)
    return MLPSpec(width=width, bias=settings.flag("add_bias_linear", True), **activation)


def read_moe(settings: FrameworkConfig, mlp: MLPSpec) -> MoESpec | None:
    """Return the routed part, None (with the fault recorded) where it makes no sense."""
    biased = settings.flag("add_bias_linear", True)
    balance = settings.flag("moe_router_enable_expert_bias")
    if biased and balance:
        settings.add_note("moe_router_enable_expert_bias", "beside a router bias; balance is read")
    scores = {"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "sqrtsoftplus"}
    scoring = settings.choice("moe_router_score_function", scores, "softmax")
    if scoring == "sqrtsoftplus":
        settings.add_note("moe_router_score_function", "cannot be held; sigmoid is read")
        scoring = "sigmoid"
    before = settings.flag("moe_router_pre_softmax")
    top_k = settings.integer("moe_router_topk", 2)
    try:
        return MoESpec(
            count=settings.integer("num_experts", 1),
            top_k=top_k,
            width=settings.integer("moe_ffn_hidden_size", mlp.width),
            shared_width=settings.integer("moe_shared_expert_intermediate_size", 0, least=0),
            shared_gate=settings.flag("moe_shared_expert_gate"),
            gated=mlp.gated,
            activation=mlp.activation,
            bias=biased,
            router_bias="balance" if balance else "linear" if biased else "none",
            scoring="softmax" if scoring == "softmax" else "sigmoid",
            normalise=top_k > 1 and (scoring != "softmax" or not before),
            scale=settings.number("moe_router_topk_scaling_factor", 1.0),
            groups=settings.integer("moe_router_num_groups", 1),
            groups_used=settings.integer("moe_router_group_topk", 1),
            latent=settings.optional_integer("moe_latent_size"),
        )
    except InputError as error:
        origin = {"top_k": "moe_router_topk", "groups_used": "moe_router_group_topk"}
        for problem in error.problems:
            settings.add_problem(
                origin.get(problem.where, "num_experts"), problem.what, problem.fix
            )
        return None
