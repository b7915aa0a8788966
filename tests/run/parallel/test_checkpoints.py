"""What one layout saves any other loads, bit by bit: weights, optimizer states, exports.

Every rank compares what it holds after a load with the same part of the model in one piece.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="saves on gloo ranks")

import torch
from torch import Tensor

from meshwright.run.kernels.optimizer.block_quantization import (
    block_scales_reference,
    dequantize_blocks,
    quantize_blocks,
)
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.huggingface import load_hf_checkpoint, save_hf_checkpoint
from meshwright.run.nn.sharding.shard_spec import ShardSpec
from meshwright.run.nn.sharding.sharded_tensor import BlockScales, ShardedTensor
from meshwright.run.nn.weight_init import materialize
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.parameter_gather import ParameterGatherer
from meshwright.run.parallel.sharded_model import ShardedModel, shard_model
from meshwright.run.train.checkpoint import CheckpointManager
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.spec.model.huggingface import read_config

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 61,
    "tie_word_embeddings": True,
}  # fmt: skip
MIXTRAL = {
    **LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {"dense": read_config(LLAMA), "experts": read_config(MIXTRAL)}

LAYOUTS = {
    "tp2-dp2": Layout(tp=2, dp=2),
    "tp2-pp2": Layout(tp=2, pp=2),
    "tp4": Layout(tp=4),  # two ranks each hold the same key and value head
    "dp4-ep2": Layout(dp=4, ep=2),
    "pp2-dp2-ep2": Layout(pp=2, dp=2, ep=2),
    "tp2-dp2-ep4": Layout(tp=2, dp=2, ep=4, expert_tp=1),
}
SMALLER = {"tp2": Layout(tp=2), "pp2": Layout(pp=2)}


def fitting(model: str, layouts: dict[str, Layout]) -> dict[str, Layout]:
    """Return the layouts that a model can have."""
    return {name: each for name, each in layouts.items() if model == "experts" or each.ep == 1}


@cache
def whole(model: str, kind: str = "weight") -> dict[str, Tensor]:
    """Return every parameter in one piece, or a state beside it, each number one of a kind."""
    decoder = build_decoder(
        MODELS[model], dtype=torch.bfloat16 if kind == "weight" else torch.float32
    )
    found = {}
    for name, value in decoder.named_parameters():
        seed = int(hashlib.sha256(f"{kind} {name}".encode()).hexdigest()[:8], 16)
        made = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
        found[name] = made.to(value.dtype)
    return found


def interval(mine: ShardedModel, name: str, holding: ShardSpec) -> tuple[int, int]:
    """Cut what ranks hold alike into shards, at other places on every tensor-parallel rank."""
    group = mine.mesh["expert_dp" if holding.is_expert else "dp"]
    elements = torch.Size(holding.shape).numel()
    shift = 3 * mine.mesh.coordinate.tp + len(name) % 5

    def end(index: int) -> int:
        if index in (0, group.size):
            return elements * index // group.size
        return min(elements, elements * index // group.size + shift)

    return end(group.index), end(group.index + 1)


def state(mine: ShardedModel, model: str, *, filled: bool) -> dict[str, ShardedTensor]:
    """Return weights as held, a state of the same shapes, and one in shards; or zeros."""
    found = {}
    for name, value in mine.decoder.named_parameters():
        holding = mine.shard_specs[name]
        second, master = (
            holding.select_local(whole(model, kind)[name]) for kind in ("second", "master")
        )
        start, stop = interval(mine, name, holding)
        tensors = {
            f"model.{name}": ShardedTensor.from_spec(value.detach(), holding),
            f"second.{name}": ShardedTensor.from_spec(second.clone(), holding),
            f"master.{name}": ShardedTensor.from_flat_range(
                master.reshape(-1)[start:stop].clone(), holding, start, stop
            ),
        }
        with torch.no_grad():
            value.copy_(holding.select_local(whole(model)[name]))
        for each in tensors.values() if not filled else ():
            each.tensor.zero_()
        found.update(tensors)
    return found


def wrong(mine: ShardedModel, model: str, found: dict[str, ShardedTensor]) -> Iterator[str]:
    """Name what is not the part of the whole that this rank holds."""
    for name in mine.shard_specs:
        holding = mine.shard_specs[name]
        start, stop = interval(mine, name, holding)
        expected = {
            "model": holding.select_local(whole(model)[name]),
            "second": holding.select_local(whole(model, "second")[name]),
            "master": holding.select_local(whole(model, "master")[name]).reshape(-1)[start:stop],
        }
        for kind, tensor in expected.items():
            if not torch.equal(found[f"{kind}.{name}"].tensor, tensor):
                yield f"rank {mine.mesh.rank}: {kind}.{name}"


def on_ranks(folder: Path, layouts: dict[str, Layout], sources: Sequence[str]) -> list[str]:
    """Save under every layout, then load under each what every one saved, and `sources`."""
    torch.set_num_threads(1)
    faults: list[str] = []
    for model, spec in MODELS.items():
        named = fitting(model, layouts)
        spreads = {
            name: shard_model(spec, Mesh(layout), dtype=torch.bfloat16)
            for name, layout in named.items()
        }
        for name, mine in spreads.items():
            with CheckpointManager(folder / model / name) as checkpoints:
                checkpoints.save(7, state(mine, model, filled=True), {})
        for source in dict.fromkeys((*named, *fitting(model, dict.fromkeys(sources, Layout())))):
            with CheckpointManager(folder / model / source) as checkpoints:
                for name, mine in spreads.items():
                    into = state(mine, model, filled=False)
                    checkpoints.load(into)
                    faults += [f"{source} to {name}: {line}" for line in wrong(mine, model, into)]
    return faults


def alone(folder: Path, model: str) -> dict[str, Tensor]:
    """Load what lies in a folder on one process."""
    kinds = {"model": "weight", "second": "second", "master": "master"}
    into = {
        f"{prefix}.{name}": torch.zeros_like(value)
        for prefix, kind in kinds.items()
        for name, value in whole(model, kind).items()
    }
    with CheckpointManager(folder) as checkpoints:
        checkpoints.load(into)
    return into


@pytest.mark.slow
def test_every_layout_loads_what_every_other_saved(tmp_path: Path) -> None:
    for model in MODELS:
        expected = {
            f"{prefix}.{name}": value
            for prefix, kind in (("model", "weight"), ("second", "second"), ("master", "master"))
            for name, value in whole(model, kind).items()
        }
        with CheckpointManager(tmp_path / model / "one") as checkpoints:
            checkpoints.save(7, expected, {})
    four = spawn_ranks(4, on_ranks, tmp_path, LAYOUTS, ["one"], timeout_s=170)
    two = spawn_ranks(2, on_ranks, tmp_path, SMALLER, ["one", "tp4", "tp2-pp2"], timeout_s=100)
    assert [line for lines in (*four, *two) for line in lines] == []
    for model in MODELS:
        size = sum(whole(model, kind)[name].nbytes
                   for kind in ("weight", "second", "master") for name in whole(model))  # fmt: skip
        for name in fitting(model, LAYOUTS) | SMALLER:
            found = alone(tmp_path / model / name, model)
            for key, value in found.items():
                prefix, _, own = key.partition(".")
                kind = "weight" if prefix == "model" else prefix
                assert torch.equal(value, whole(model, kind)[own]), f"{model} {name}: {key}"
            files = [*(tmp_path / model / name / "000001-step-7").glob("*.safetensors")]
            written = [path.stat().st_size for path in files]
            headers = [int.from_bytes(path.read_bytes()[:8], "little") + 8 for path in files]
            assert sum(written) - sum(headers) == size, "nothing is written twice"
            assert max(written) < 0.7 * sum(written), "every rank takes part"


def filled(mine: ShardedModel, model: str) -> ShardedModel:
    with torch.no_grad():
        for name, value in mine.decoder.named_parameters():
            value.copy_(mine.shard_specs[name].select_local(whole(model)[name]))
    return mine


def export(folder: Path) -> list[str]:
    """Export from one layout and read the result under others; return what is wrong."""
    torch.set_num_threads(1)
    faults = []
    for model, spec in MODELS.items():
        named = fitting(model, LAYOUTS)
        plain = build_decoder(spec, dtype=torch.bfloat16)
        for name in ("tp2-pp2", "tp4", "pp2-dp2-ep2"):
            if name not in named:
                continue
            mine = filled(shard_model(spec, Mesh(named[name]), dtype=torch.bfloat16), model)
            target = folder / model / name
            save_hf_checkpoint(
                plain, target, shard_bytes=20_000, whole=ParameterGatherer(mine, plain)
            )
            mine.mesh.world.barrier()
            faults += [
                f"{model} {name}: {path.name} differs"
                for path in (folder / model / "one").iterdir()
                if path.read_bytes() != (target / path.name).read_bytes()
            ]
        for name, layout in named.items():
            mine = shard_model(spec, Mesh(layout), dtype=torch.bfloat16, seed=3)
            load_hf_checkpoint(
                mine.decoder, folder / model / "tp2-pp2", shard_specs=mine.shard_specs
            )
            for own, value in mine.decoder.named_parameters():
                if not torch.equal(value, mine.shard_specs[own].select_local(whole(model)[own])):
                    faults.append(f"{model} {name}: {own}")
    return faults


def one_piece(model: Model, name: str) -> Decoder:
    decoder = build_decoder(model, dtype=torch.bfloat16)
    materialize(decoder, "cpu")
    with torch.no_grad():
        for own, value in decoder.named_parameters():
            value.copy_(whole(name)[own])
    return decoder


@pytest.mark.slow
def test_an_export_is_the_same_from_every_layout_and_loads_under_every_other(
    tmp_path: Path,
) -> None:
    for name, model in MODELS.items():
        save_hf_checkpoint(one_piece(model, name), tmp_path / name / "one", shard_bytes=20_000)
    assert spawn_ranks(4, export, tmp_path, timeout_s=170) == [[], [], [], []]


def moments(mine: ShardedModel, *, filled: bool) -> dict[str, ShardedTensor | BlockScales]:
    """Return 8-bit moments of what a rank holds, coded as its optimizer would, or zeros."""
    found: dict[str, ShardedTensor | BlockScales] = {}
    for name, holding in mine.shard_specs.items():
        values = holding.select_local(whole("dense", "second")[name]).contiguous()
        scales = block_scales_reference(values)
        half = torch.full_like(values, 1 << 23, dtype=torch.int64)
        codes = quantize_blocks(values, scales, half, torch.int8)
        if not filled:
            codes, scales = torch.zeros_like(codes), torch.zeros_like(scales)
        found[f"first.{name}"] = ShardedTensor.from_spec(codes, holding)
        found[f"scale.{name}"] = BlockScales.from_spec(scales, f"first.{name}", holding)
    return found


def blocks(folder: Path) -> list[str]:
    """Save 8-bit moments, load them under other layouts, and say what is not as it was."""
    torch.set_num_threads(1)
    told = []
    with CheckpointManager(folder) as checkpoints:
        checkpoints.save(1, moments(of_dense("tp2-dp2"), filled=True), {})
        for name in ("tp2-dp2", "tp2-pp2", "tp4"):
            mine = of_dense(name)
            into, coded = moments(mine, filled=False), moments(mine, filled=True)
            checkpoints.load(into)
            for own in mine.shard_specs:
                pair = [(state[f"first.{own}"], state[f"scale.{own}"]) for state in (into, coded)]
                here, there = (
                    dequantize_blocks(codes.tensor, scale.tensor) for codes, scale in pair
                )
                # Stages hold other parameters, and each of them as before.
                same = torch.equal(here, there) if name != "tp4" else close(here, there)
                told += [] if same else [f"{name}: {own}"]
    return told


def of_dense(name: str) -> ShardedModel:
    return shard_model(MODELS["dense"], Mesh(LAYOUTS[name]), dtype=torch.bfloat16)


def close(here: Tensor, there: Tensor) -> bool:
    """Tell whether codes are as near as two roundings leave them, each by half a code."""
    largest = float(there.abs().max())
    return bool(((here - there).abs() <= (there.abs() / 7).clamp(min=2**-16 * largest)).all())


@pytest.mark.slow
def test_moments_of_eight_bits_move_between_layouts(tmp_path: Path) -> None:
    assert spawn_ranks(4, blocks, tmp_path) == [[], [], [], []]
