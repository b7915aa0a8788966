"""Ranks that share a model share its adapter, and train it as one device does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="adapts torch modules")

import torch
from safetensors.torch import load_file
from torch import Tensor

from meshwright.errors import InputError
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.sharding.shard_spec import IndexRange, ShardSpec
from meshwright.run.nn.weight_init import materialize
from meshwright.run.parallel.forward_backward import ForwardBackwardRunner
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.microbatch import Microbatch
from meshwright.run.parallel.shard_specs import make_shard_specs
from meshwright.run.parallel.sharded_model import shard_model
from meshwright.run.parallel.zero.gradient_sync import make_gradient_sync
from meshwright.run.posttrain.lora import DecoderAdapter, LoRAConfig, attach_adapter, save_adapter
from meshwright.run.posttrain.lora.adapter_sharding import find_local_rows, gather_adapter
from meshwright.run.posttrain.lora.decoder_adapter import PEFT_PREFIX, build_adapter_shards
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.spec.model.huggingface.config_json import read_config

_SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": 61, "intermediate_size": 48, "num_hidden_layers": 2, "attention_bias": True,
    "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61,
    "num_key_value_heads": 4, "intermediate_size": 48, "num_hidden_layers": 2, "q_lora_rank": 24,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "max_position_embeddings": 32, "first_k_dense_replace": 2, "n_routed_experts": None,
    "moe_intermediate_size": 16, "num_nextn_predict_layers": 0,
}  # fmt: skip
MODELS: dict[str, Callable[[], Model]] = {
    "own keys": lambda: read_config({"model_type": "qwen2", **_SIZES}),
    "shared keys": lambda: read_config(
        {"model_type": "llama", **_SIZES, "num_key_value_heads": 1, "mlp_bias": True}
    ),
    "fused, shared keys": lambda: read_config(
        {"model_type": "phi3", **_SIZES, "num_key_value_heads": 1, "attention_bias": False}
    ),
    "latent": lambda: read_config(_LATENT),
}
LAYOUTS = {
    2: (Layout(tp=2, precision="fp32"), Layout(tp=2, sequence_parallel=True, precision="fp32"),
        Layout(pp=2, precision="fp32")),
    4: (Layout(tp=4, precision="fp32"), Layout(tp=2, pp=2, precision="fp32")),
}  # fmt: skip


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_hold_every_number_of_an_adapter(name: str, tp: int) -> None:
    model, settings = MODELS[name](), LoRAConfig(rank=3, dora=True)
    whole = build_decoder(model)
    ranks = [
        build_adapter_shards(model, make_shard_specs(whole, Layout(tp=tp), rank), settings)
        for rank in range(tp)
    ]
    for module, pairs in ranks[0].items():
        for leaf in pairs:
            held = [each[module][leaf] for each in ranks]
            counts = torch.zeros(held[0].global_shape)
            for each in held:
                for box in each.list_boxes():
                    counts[tuple(slice(*place) for place in box.global_ranges)] += 1
            # All of it is with every rank, or each number with one rank and its twins.
            copies = {tp} if held[0].is_unsharded else {1, held[0].kv_replicas}
            assert set(counts.flatten().tolist()) <= copies, (module, leaf)
            if held[0].is_unsharded:  # which needs the gradients of all
                assert held[0].grad_sum_group == "tp", (module, leaf)


def test_rows_of_keys_that_lie_apart_are_refused() -> None:
    rows = find_local_rows(torch.tensor([0, 1, 4, 2]), 4, IndexRange(1, 2))
    assert rows.row_indices.tolist() == [0, 1, 2]
    assert rows.replicated_rows == IndexRange(1, 2)
    with pytest.raises(InputError, match="key and value heads"):
        find_local_rows(torch.tensor([0, 2, 4, 1]), 4, IndexRange(0, 2))


def stirred(adapter: DecoderAdapter, held: dict[str, ShardSpec] | None = None) -> None:
    """Give every parameter numbers that show, the same whoever holds which part."""
    own = dict(adapter.named_parameters())
    with torch.no_grad():
        for number, (name, shape) in enumerate(adapter.global_shapes().items()):
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(number))
            if name in own:
                part = noise if held is None else held[name].select_local(noise)
                own[name].copy_(1 + part / 5 if "magnitude" in name else part / 4)


def batch(vocab: int) -> Microbatch:
    tokens = torch.randint(0, vocab, (2, 12), generator=torch.Generator().manual_seed(5))
    return Microbatch(tokens, tokens.roll(-1, 1))


def settings_of(dora: bool) -> LoRAConfig:
    return LoRAConfig(rank=3, alpha=6.0, dora=dora, dropout=0.0)


def alone(name: str, dora: bool, folder: Path) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of one device."""
    model = MODELS[name]()
    whole: Decoder = build_decoder(model, dtype=torch.float32)
    materialize(whole, "cpu", seed=1)
    adapter = attach_adapter(whole, settings_of(dora), seed=2)
    save_adapter(adapter, folder / f"{name} {dora}")
    stirred(adapter)
    given = batch(model.vocab)
    loss = whole.loss(given.tokens_BT, given.labels_BT)
    loss.loss_sum.backward()  # type: ignore[no-untyped-call]
    found = {key: one.grad for key, one in adapter.named_parameters() if one.grad is not None}
    return float(loss.loss_sum.detach()), found


def on_ranks(layout: Layout, folder: Path) -> dict[str, tuple[float, dict[str, Tensor]]]:
    """Return the same of ranks, which write the adapter as it begins."""
    torch.set_num_threads(1)
    mesh, found = Mesh(layout), {}
    for name, make in MODELS.items():
        for dora in (False, True):
            model = make()
            mine = shard_model(model, mesh, dtype=torch.float32, seed=1)
            adapter = attach_adapter(mine.decoder, settings_of(dora), seed=2, sharded_model=mine)
            held, used_with = adapter.parameter_shards(mine)
            mine = mine.with_trainable(dict(adapter.named_parameters()), held, used_with)
            shapes = adapter.global_shapes()
            tensors = gather_adapter(mine, dict(adapter.named_parameters()), shapes, keep=True)
            if mesh.rank == 0:
                save_adapter(adapter, folder / f"{name} {dora}", tensors=tensors)
            stirred(adapter, held)
            sync, runner = make_gradient_sync(mine), ForwardBackwardRunner(mine)
            sync.begin_step()
            sums = runner([batch(model.vocab)], 1.0, sync.mark_last_backward)
            slopes: Any = sync.reduced_gradients()
            nats = mesh["pp"].all_reduce(sums.loss_sum.clone())
            found[f"{name} {dora}"] = (float(nats), gather_adapter(mine, slopes, shapes, keep=True))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_and_folders_are_those_of_one_device(ranks: int, tmp_path: Path) -> None:
    wanted = {
        f"{name} {dora}": alone(name, dora, tmp_path / "alone")
        for name in MODELS
        for dora in (False, True)
    }
    for number, layout in enumerate(LAYOUTS[ranks]):
        several = tmp_path / f"several {number}"
        for found in spawn_ranks(ranks, on_ranks, layout, several):
            for case, (loss, gradients) in wanted.items():
                nats, slopes = found[case]
                assert nats == pytest.approx(loss, rel=1e-5), (case, layout)
                assert slopes.keys() == gradients.keys()
                for name, one in gradients.items():
                    off = float((slopes[name] - one).norm() / one.norm())
                    assert off < 1e-4, (case, layout, name.removeprefix(PEFT_PREFIX), off)
        for case in wanted:
            same_folder(tmp_path / "alone" / case, several / case)


def same_folder(one: Path, other: Path) -> None:
    """Hold two folders of PEFT's against each other."""
    config, tensors = "adapter_config.json", "adapter_model.safetensors"
    assert (one / config).read_bytes() == (other / config).read_bytes()
    alone, several = load_file(one / tensors), load_file(other / tensors)
    assert list(alone) == list(several)
    for name, value in alone.items():
        # Lengths of rows are sums over ranks; all else is drawn.
        most = 1e-6 if "magnitude" in name else 0.0
        torch.testing.assert_close(several[name], value, rtol=most, atol=0.0)
