"""Experts against the modules of transformers, each with a tiny configuration of its own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.run.nn.moe.moe_layer import MoELayer
from meshwright.spec.model import feedforward

transformers = pytest.importorskip("transformers")

HIDDEN = 24


def spec(**changes: Any) -> feedforward.MoESpec:
    return feedforward.MoESpec(**{"count": 8, "top_k": 3, "width": 16, **changes})


FAMILIES: dict[str, tuple[dict[str, Any], feedforward.MoESpec]] = {
    "mixtral": ({"num_local_experts": 8, "intermediate_size": 16}, spec()),
    "qwen2_moe": (
        {"num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32},
        spec(shared_width=32, shared_gate=True, normalise=False),
    ),
    "qwen3_moe": (
        {"num_experts": 8, "moe_intermediate_size": 16, "norm_topk_prob": True},
        spec(),
    ),
    "olmoe": ({"num_experts": 8, "intermediate_size": 16}, spec(normalise=False)),
    "deepseek_v2": (
        {
            "n_routed_experts": 8,
            "moe_intermediate_size": 16,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 4.0,
        },
        spec(shared_width=32, normalise=False, scale=4.0, groups=4, groups_used=2),
    ),
    "deepseek_v3": (
        {
            "n_routed_experts": 8,
            "moe_intermediate_size": 16,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
        spec(
            shared_width=32,
            scoring="sigmoid",
            router_bias="balance",
            scale=2.5,
            groups=4,
            groups_used=2,
        ),
    ),
    "gpt_oss": (
        {"num_local_experts": 8, "intermediate_size": 16},
        spec(bias=True, router_bias="linear", activation="swiglu-clamped"),
    ),
    "nemotron_h": (
        {
            "n_routed_experts": 8,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 8,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
        spec(
            gated=False,
            activation="relu2",
            shared_width=40,
            latent=8,
            scoring="sigmoid",
            router_bias="balance",
            scale=2.5,
        ),
    ),
}


def theirs(family: str, changes: dict[str, Any]) -> nn.Module:
    config = transformers.AutoConfig.for_model(
        family, hidden_size=HIDDEN, num_attention_heads=4, num_experts_per_tok=3, **changes
    )
    config._experts_implementation = "eager"
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    names = [name for name in vars(modeling) if name.endswith(("MoeBlock", "V2Moe", "MoE"))]
    module: nn.Module = getattr(modeling, (names or ["GptOssMLP"])[0])(config)
    torch.manual_seed(7)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.normal_(std=0.3)
    return module


MODULES = {
    "gate": "router",
    "router": "router",
    "shared_expert": "shared",
    "shared_experts": "shared",
    "shared_expert_gate": "shared_gate",
    "fc1_latent_proj": "latent_down",
    "fc2_latent_proj": "latent_up",
}


def in_our_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename what a family's module holds; see meshwright.run.nn.huggingface for whole models."""
    ours = {}
    for name, tensor in state.items():
        module, _, rest = name.partition(".")
        rest = rest.replace("_proj", "")
        ours[rest if module == "experts" else f"{MODULES[module]}.{rest}"] = tensor
    if "router.e_score_correction_bias" in ours:
        ours["balance"] = ours.pop("router.e_score_correction_bias")
    if "shared.gate.weight" in ours:
        halves = [ours.pop(f"shared.{half}.weight") for half in ("gate", "up")]
        ours["shared.gate_up.weight"] = torch.cat(halves)
    if "gate_up_bias" in ours:  # gpt-oss: [X, in, out], gate and up columns take turns
        for name in ("gate_up", "gate_up_bias"):
            ours[name] = torch.cat([ours[name][..., ::2], ours[name][..., 1::2]], -1)
        for name in ("gate_up", "down"):
            ours[name] = ours[name].transpose(1, 2).contiguous()
    return ours


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_transformers(family: str) -> None:
    changes, described = FAMILIES[family]
    module = theirs(family, changes)
    experts = MoELayer(described, HIDDEN, dtype=torch.float32)
    experts.load_state_dict(in_our_names(module.state_dict()))
    x = torch.randn(2, 9, HIDDEN, requires_grad=True)
    slope = torch.randn_like(x)
    answer = module(x)
    wanted = answer[0] if isinstance(answer, tuple) else answer
    found = experts(x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    (ours,), (other,) = (torch.autograd.grad(each, x, slope) for each in (found, wanted))
    torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)
