"""An adapter computes what the dense weight it stands for computes, forward and backward."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from meshwright.errors import InputError
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import BuildOptions, build_decoder
from meshwright.run.nn.linear.fp8_conversion import apply_precision
from meshwright.run.nn.linear.linear import Linear
from meshwright.run.nn.recompute import apply_recompute
from meshwright.run.nn.weight_init import materialize
from meshwright.run.posttrain.lora import (
    DecoderAdapter,
    LoRAConfig,
    attach_adapter,
    build_lora_config,
)
from meshwright.run.posttrain.lora.decoder_adapter import (
    find_adaptable_modules,
    to_hf_module_name,
    validate_targets,
)
from meshwright.run.serve.model.lora import list_packed_modules
from meshwright.spec.layout import Layout
from meshwright.spec.model import AttentionSpec, BlockSpec, MLPSpec, Model, Rotary
from meshwright.spec.model.huggingface import read_config
from meshwright.spec.workload.lora import LoRASpec, LoRATarget
from tests.run.nn.huggingface.drawn import DRAWS, draw
from tests.run.posttrain.lora.models import far, ours, stir, tokens

FAMILIES = ["llama", "gpt_neox", "deepseek_v3", "nemotron_h", "qwen3_next"]


def small(dtype: torch.dtype = torch.float32) -> Decoder:
    attention = AttentionSpec(heads=4, kv_heads=2, head_dim=8, rotary=Rotary())
    block = BlockSpec(name="block", mixer=attention, mlp=MLPSpec(width=48))
    model = Model(
        name="small", family="llama", hidden=32, vocab=48, blocks=(block,), pattern="block block",
        max_positions=32,
    )  # fmt: skip
    decoder = build_decoder(model, dtype=dtype)
    materialize(decoder, "cpu", seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in decoder.parameters():
            if value.dim() == 2:  # large enough that logits tell tokens apart
                noise = torch.randn(value.shape, generator=generator)
                value.copy_(noise / value.shape[1] ** 0.5)
    return decoder


def dense(decoder: Decoder, adapter: DecoderAdapter) -> dict[str, Tensor]:
    """Return the weights that an adapter stands for, written out module by module."""
    found = {name: value.detach() for name, value in decoder.named_parameters()}
    for name, parts in list_packed_modules(decoder).items():
        weight = found[f"{name}.weight"].clone()
        for part in parts:
            pair = adapter.lora_pairs.get(to_hf_module_name(part))
            if pair is None:
                continue
            change = pair.scale * pair.lora_B.weight @ pair.lora_A.weight
            for link in part.links:
                whole = link.view_parameter(weight.clone()) + link.view_checkpoint(change)
                if pair.lora_magnitude_vector is not None:
                    length = whole.norm(dim=-1, keepdim=True).detach()
                    both = pair.lora_magnitude_vector[:, None].expand(-1, whole.shape[-1])
                    whole = whole * link.view_checkpoint(both) / length
                link.view_parameter(weight).copy_(whole)
        found[f"{name}.weight"] = weight
    return found


def gradients(adapter: DecoderAdapter, logits: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(8)
    slope = torch.randn(logits.shape, generator=generator)
    names, values = zip(*adapter.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(logits, values, slope.to(logits)), strict=True))


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_the_dense_weight(
    family: str, dora: bool, tmp_path: Path
) -> None:
    decoder = ours(tmp_path, family)
    adapter = attach_adapter(decoder, LoRAConfig(rank=3, alpha=5, dora=dora))
    stir(adapter)
    ids = tokens(decoder.model.vocab)
    found = decoder(ids)
    got = gradients(adapter, found)
    adapter.remove()
    wanted = functional_call(decoder, dense(decoder, adapter), (ids,))
    assert far(found, wanted) < 1e-4
    for name, value in gradients(adapter, wanted).items():
        assert far(got[name], value) < 1e-3, name


@pytest.mark.parametrize(
    "targets", [("q_proj", "v_proj"), ("k_proj", "up_proj"), r".*\.1\.mlp\..*"]
)
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_some_rows_of_a_fused_product_are_adapted_alone(targets: Any, dora: bool) -> None:
    decoder = small()
    adapter = attach_adapter(
        decoder, LoRAConfig(rank=2, target_modules=targets, dora=dora, rank_pattern={"v_proj": 4})
    )
    stir(adapter)
    ids = tokens(decoder.model.vocab)
    found = decoder(ids)
    got = gradients(adapter, found)
    adapter.remove()
    wanted = functional_call(decoder, dense(decoder, adapter), (ids,))
    assert far(found, wanted) < 1e-5
    for name, value in gradients(adapter, wanted).items():
        assert far(got[name], value) < 1e-4, name


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_a_new_adapter_changes_nothing_and_freezes_the_rest(dora: bool) -> None:
    decoder = small()
    ids = tokens(decoder.model.vocab)
    before, names = decoder(ids), [name for name, _ in decoder.named_parameters()]
    adapter = attach_adapter(decoder, LoRAConfig(dora=dora))
    assert far(decoder(ids), before) < 1e-6
    assert [name for name, _ in decoder.named_parameters()] == names
    assert not any(value.requires_grad for value in decoder.parameters())
    assert all(value.requires_grad for value in adapter.parameters())


def test_a_is_drawn_as_peft_draws_it() -> None:
    decoder = small()
    uniform = attach_adapter(decoder, LoRAConfig(rank=16), seed=1)
    uniform.remove()
    again = attach_adapter(decoder, LoRAConfig(rank=16), seed=1)
    again.remove()
    gaussian = attach_adapter(decoder, LoRAConfig(rank=16, init="gaussian"), seed=1)
    for name, pair in uniform.lora_pairs.items():
        a = pair.lora_A.weight.detach()
        bound = a.shape[1] ** -0.5
        assert 0.9 * bound < float(a.abs().max()) <= bound
        assert abs(float(a.std()) / (bound / 3**0.5) - 1) < 0.15
        assert not pair.lora_B.weight.any()
        assert torch.equal(a, again.lora_pairs[name].lora_A.weight)
        normal = gaussian.lora_pairs[name].lora_A.weight.detach()
        assert abs(float(normal.std()) * 16 - 1) < 0.15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_merging_is_taken_back_bit_by_bit(dora: bool, dtype: torch.dtype) -> None:
    decoder = small(dtype)
    adapter = attach_adapter(decoder, LoRAConfig(rank=2, dora=dora))
    stir(adapter)
    ids = tokens(decoder.model.vocab)
    kept = {name: value.clone() for name, value in decoder.named_parameters()}
    wanted = {name: value.to(dtype) for name, value in dense(decoder.float(), adapter).items()}
    decoder.to(dtype)
    beside = decoder(ids)
    adapter.merge()
    for name, value in decoder.named_parameters():
        assert far(value.float(), wanted[name].float()) < (1e-6 if dtype == torch.float32 else 1e-3)
    assert all(layer.tp_overlap is None for layer in decoder.modules() if isinstance(layer, Linear))
    assert far(decoder(ids).float(), beside.float()) < (1e-5 if dtype == torch.float32 else 0.05)
    with pytest.raises(InputError, match="unmerge it first"):
        adapter.merge()
    adapter.unmerge()
    assert all(torch.equal(value, kept[name]) for name, value in decoder.named_parameters())
    assert torch.equal(decoder(ids), beside)
    adapter.merge(keep=False)
    with pytest.raises(InputError, match="were not kept"):
        adapter.unmerge()


def test_the_frozen_model_answers_while_an_adapter_is_disabled() -> None:
    decoder = small()
    ids = tokens(decoder.model.vocab)
    before = decoder(ids)
    adapter = attach_adapter(decoder, LoRAConfig())
    stir(adapter)
    with adapter.disable_adapter():
        assert torch.equal(decoder(ids), before)
    assert far(decoder(ids), before) > 0.1


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("ops", ["full", ("layernorm", "mlp_act"), ("mlp", "core_attn")])
def test_recomputing_changes_no_gradient(ops: Any, dora: bool) -> None:
    decoder = small()
    adapter = attach_adapter(decoder, LoRAConfig(rank=2, dora=dora))
    stir(adapter)
    ids = tokens(decoder.model.vocab)
    wanted = gradients(adapter, decoder(ids))
    layout = Layout(recompute="full")
    if ops != "full":
        layout = Layout(recompute="selective", recompute_ops=ops)
    apply_recompute(decoder.layers, layout)
    for name, value in gradients(adapter, decoder(ids)).items():
        assert torch.equal(value, wanted[name]), name


def test_inputs_are_dropped_in_training_alone() -> None:
    decoder = small()
    adapter = attach_adapter(decoder, LoRAConfig(rank=2, dropout=0.5))
    stir(adapter)
    ids = tokens(decoder.model.vocab)
    adapter.eval()
    whole = decoder(ids)
    assert torch.equal(decoder(ids), whole)
    adapter.train()
    assert far(decoder(ids), whole) > 0.01
    apply_recompute(decoder.layers, Layout(recompute="full"))
    with pytest.raises(InputError, match="when backward runs full again"):
        decoder(ids)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_dropped_inputs_are_right_on_average(dora: bool) -> None:
    decoder = small()
    adapter = attach_adapter(
        decoder, LoRAConfig(rank=2, dropout=0.3, dora=dora, target_modules=("q_proj", "v_proj"))
    )
    stir(adapter)
    layer = decoder.layers[0].get_submodule("mixer.qkv")
    x = torch.randn(1, 32, generator=torch.Generator().manual_seed(1))
    adapter.eval()
    whole = layer(x)
    adapter.train()
    torch.manual_seed(0)
    with torch.no_grad():
        many = layer(x.expand(20_000, -1))
    assert far(many.mean(0, keepdim=True), whole) < 0.02
    assert float(many.std(0)[:32].min()) > 0
    keys = slice(32, 48)
    assert torch.allclose(many[:, keys], whole[:, keys].expand(20_000, -1), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_an_adapter_learns_alone(dora: bool, dtype: torch.dtype) -> None:
    decoder = small(dtype)
    kept = {name: value.clone() for name, value in decoder.named_parameters()}
    adapter = attach_adapter(decoder, LoRAConfig(rank=8, alpha=16, dora=dora))
    ids = tokens(decoder.model.vocab, seed=4)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=2e-2, weight_decay=0.0)
    losses = []
    for _ in range(60):
        logits = decoder(ids[:, :-1]).float()
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 3
    assert losses[-1] < 0.5
    assert all(torch.equal(value, kept[name]) for name, value in decoder.named_parameters())


@pytest.mark.parametrize("family", sorted(set(DRAWS) - {"gpt2"}))
def test_modules_are_named_as_transformers_names_them(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = draw(family, 0)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(family, **config)
        )
    decoder = build_decoder(
        read_config({**config, "model_type": family}), options=BuildOptions(include_mtp=False)
    )
    for name, shape in find_adaptable_modules(decoder).items():
        assert tuple(theirs.get_submodule(name).weight.shape) == shape, name


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_stand_beside_products_in_fp8(dora: bool) -> None:
    decoder = small(torch.bfloat16)
    adapter = attach_adapter(decoder, LoRAConfig(rank=2, dora=dora))
    stir(adapter)
    layer = decoder.layers[0].get_submodule("mixer.qkv")
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    pairs = adapter.layers["layers.0.mixer.qkv"].lora_pairs
    given = [value for pair in pairs for value in pair.parameters()]

    def tried() -> list[Tensor]:
        entered = x.clone().requires_grad_()
        y = layer(entered)
        slope = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)
        return [y.detach(), *torch.autograd.grad(y, (entered, *given), slope)]

    wanted = tried()
    assert (
        "layers.0.mixer.qkv"
        in apply_precision(decoder, "fp8-rowwise", smallest=0).converted_modules
    )
    found = tried()
    assert far(found[0].float(), wanted[0].float()) > 0
    for got, exact in zip(found, wanted, strict=True):
        assert far(got.float(), exact.float()) < 0.06  # fp8 keeps three bits
    adapter.merge()
    with torch.no_grad():
        assert far(layer(x).float(), wanted[0].float()) < 0.06
    adapter.unmerge()
    with adapter.disable_adapter(), torch.no_grad():
        assert far(layer(x).float(), wanted[0].float()) > 0.3


def test_a_workload_says_which_matrices_carry_adapters(tmp_path: Path) -> None:
    decoder = ours(tmp_path)

    def ends(*targets: LoRATarget) -> set[str]:
        settings = build_lora_config(decoder, LoRASpec(rank=4, targets=targets), alpha=2.0)
        assert (settings.rank, settings.alpha) == (4, 2.0)
        return {name.rpartition(".")[2] for name in settings.target_modules}

    assert ends("qkv") == {"q_proj", "k_proj", "v_proj"}
    assert ends("out", "down") == {"o_proj", "down_proj"}
    assert ends("up") == {"gate_proj", "up_proj"}
    with pytest.raises(InputError, match="leave experts out"):
        ends("experts")


def test_what_cannot_be_adapted_is_refused() -> None:
    for given, match in (
        ({"rank": 0}, "rank"), ({"alpha": 0.0}, "alpha"), ({"dropout": 1.0}, "no share"),
        ({"target_modules": ()}, "names no module"),
        ({"target_modules": "q_proj("}, "is no regular expression"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=match):
            LoRAConfig(**given)
    decoder = small()
    with pytest.raises(InputError, match="use some of down_proj, gate_proj, k_proj"):
        attach_adapter(decoder, LoRAConfig(target_modules=("queries",)))
    with pytest.raises(InputError, match=r"adapter.target_modules: 'v_prj' names no linear layer"):
        validate_targets(decoder.model, LoRAConfig(target_modules=("q_proj", "v_prj")))
    with pytest.raises(InputError, match="one text is a regular expression of whole names"):
        attach_adapter(decoder, LoRAConfig(target_modules="q_proj"))
    attach_adapter(decoder, LoRAConfig(target_modules=("q_proj",)))
    with pytest.raises(InputError, match="has an adapter already"):
        attach_adapter(decoder, LoRAConfig())
    with pytest.raises(InputError, match="no weights yet"):
        attach_adapter(build_decoder(decoder.model), LoRAConfig())
