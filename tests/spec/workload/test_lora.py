"""An adapter names the matrices it sits beside, and refuses what names none."""

import pytest

from meshwright.errors import InputError
from meshwright.spec import catalog
from meshwright.spec.model import count_flops
from meshwright.spec.workload import LoRASpec, LoRATarget, get_lora_target, training_flops

LLAMA, DEEPSEEK = catalog.get_model("llama3.1-8b"), catalog.get_model("deepseek-v3")


def targets(model: str) -> dict[str, LoRATarget | None]:
    found = catalog.get_model(model)
    return {
        weight.name: get_lora_target(weight)
        for block in found.blocks
        for weight in block.list_weights(found.hidden)
    }


def test_every_matrix_of_a_dense_model_carries_one_unless_said_otherwise() -> None:
    assert set(targets("llama3.1-8b")) == {"q", "k", "v", "o", "gate", "up", "down"}
    assert all(map(LoRASpec(rank=8).is_target, LLAMA.blocks[0].list_weights(LLAMA.hidden)))


def test_routed_experts_and_routers_are_frozen_by_default() -> None:
    block = next(block for block in DEEPSEEK.blocks if "moe" in block.name)
    trained = {w.part for w in block.list_weights(DEEPSEEK.hidden) if LoRASpec(rank=8).is_target(w)}
    assert trained == {"mixer", "shared"}


def test_named_experts_are_trained() -> None:
    words = targets("deepseek-v3")
    assert words["expert_gate"] == words["expert_down"] == "experts"
    assert words["router"] is None


def test_what_makes_latents_goes_with_queries_and_keys() -> None:
    words = targets("deepseek-v3")
    assert {words["q_down"], words["kv_up"]} == {"qkv"}
    assert words["o"] == "out"


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"rank": 0}, "rank"),
        ({"rank": 8, "targets": ("q",)}, "targets[0]"),
        ({"rank": 8, "targets": ()}, "targets"),
        ({"rank": 8, "targets": ("up", "up")}, "targets"),
    ],
)
def test_a_mistake_names_its_field(fields: dict[str, object], where: str) -> None:
    with pytest.raises(InputError) as caught:
        LoRASpec(**fields)  # type: ignore[arg-type]
    assert [problem.where for problem in caught.value.problems] == [where]


@pytest.mark.parametrize("model", ["llama3.1-8b", "deepseek-v3"])
def test_frozen_matrices_cost_no_weight_gradients(model: str) -> None:
    found, length = catalog.get_model(model), 4096
    whole = count_flops(found, length)
    assert training_flops(found, length, None) == whole.total
    forward_and_inputs = 2 * whole.forward
    small = training_flops(found, length, LoRASpec(rank=1, targets=("qkv",)))
    assert forward_and_inputs < small < whole.total


def test_adapters_add_their_own_products() -> None:
    pairs = 2 * 32 * sum(w.fan_in + w.fan_out for w in LLAMA.blocks[0].list_weights(LLAMA.hidden))
    one, three = (training_flops(LLAMA, 4096, LoRASpec(rank=rank)) for rank in (1, 3))
    assert three - one == 2 * 3 * pairs
