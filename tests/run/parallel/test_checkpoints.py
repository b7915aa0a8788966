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

from meshwright.run.kernels.block_codes import plain_decode, plain_encode, plain_scales
from meshwright.run.nn.build import build
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.holding import Holding
from meshwright.run.nn.huggingface import load, save
from meshwright.run.nn.initialise import materialise
from meshwright.run.nn.placed import BlockScales, Placed
from meshwright.run.parallel.collective.launch import launch
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.spread import Spread, spread
from meshwright.run.parallel.whole import Wholes
from meshwright.run.train.checkpoint import Checkpoints
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
    decoder = build(MODELS[model], dtype=torch.bfloat16 if kind == "weight" else torch.float32)
    found = {}
    for name, value in decoder.named_parameters():
        seed = int(hashlib.sha256(f"{kind} {name}".encode()).hexdigest()[:8], 16)
        made = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
        found[name] = made.to(value.dtype)
    return found


def interval(mine: Spread, name: str, holding: Holding) -> tuple[int, int]:
    """Cut what ranks hold alike into shards, at other places on every tensor-parallel rank."""
    group = mine.mesh["expert_dp" if holding.expert else "dp"]
    elements = torch.Size(holding.shape).numel()
    shift = 3 * mine.mesh.place.tp + len(name) % 5

    def end(index: int) -> int:
        if index in (0, group.size):
            return elements * index // group.size
        return min(elements, elements * index // group.size + shift)

    return end(group.index), end(group.index + 1)


def state(mine: Spread, model: str, *, filled: bool) -> dict[str, Placed]:
    """Return weights as held, a state of the same shapes, and one in shards; or zeros."""
    found = {}
    for name, value in mine.decoder.named_parameters():
        holding = mine.holdings[name]
        second, master = (holding.take(whole(model, kind)[name]) for kind in ("second", "master"))
        start, stop = interval(mine, name, holding)
        tensors = {
            f"model.{name}": Placed.of(value.detach(), holding),
            f"second.{name}": Placed.of(second.clone(), holding),
            f"master.{name}": Placed.of_interval(
                master.reshape(-1)[start:stop].clone(), holding, start, stop
            ),
        }
        with torch.no_grad():
            value.copy_(holding.take(whole(model)[name]))
        for each in tensors.values() if not filled else ():
            each.tensor.zero_()
        found.update(tensors)
    return found


def wrong(mine: Spread, model: str, found: dict[str, Placed]) -> Iterator[str]:
    """Name what is not the part of the whole that this rank holds."""
    for name in mine.holdings:
        holding = mine.holdings[name]
        start, stop = interval(mine, name, holding)
        expected = {
            "model": holding.take(whole(model)[name]),
            "second": holding.take(whole(model, "second")[name]),
            "master": holding.take(whole(model, "master")[name]).reshape(-1)[start:stop],
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
            name: spread(spec, Mesh(layout), dtype=torch.bfloat16) for name, layout in named.items()
        }
        for name, mine in spreads.items():
            with Checkpoints(folder / model / name) as checkpoints:
                checkpoints.save(7, state(mine, model, filled=True), {})
        for source in dict.fromkeys((*named, *fitting(model, dict.fromkeys(sources, Layout())))):
            with Checkpoints(folder / model / source) as checkpoints:
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
    with Checkpoints(folder) as checkpoints:
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
        with Checkpoints(tmp_path / model / "one") as checkpoints:
            checkpoints.save(7, expected, {})
    four = launch(4, on_ranks, tmp_path, LAYOUTS, ["one"], timeout_s=170)
    two = launch(2, on_ranks, tmp_path, SMALLER, ["one", "tp4", "tp2-pp2"], timeout_s=100)
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


def filled(mine: Spread, model: str) -> Spread:
    with torch.no_grad():
        for name, value in mine.decoder.named_parameters():
            value.copy_(mine.holdings[name].take(whole(model)[name]))
    return mine


def export(folder: Path) -> list[str]:
    """Export from one layout and read the result under others; return what is wrong."""
    torch.set_num_threads(1)
    faults = []
    for model, spec in MODELS.items():
        named = fitting(model, LAYOUTS)
        plain = build(spec, dtype=torch.bfloat16)
        for name in ("tp2-pp2", "tp4", "pp2-dp2-ep2"):
            if name not in named:
                continue
            mine = filled(spread(spec, Mesh(named[name]), dtype=torch.bfloat16), model)
            target = folder / model / name
            save(plain, target, shard_bytes=20_000, whole=Wholes(mine, plain))
            mine.mesh.world.barrier()
            faults += [
                f"{model} {name}: {path.name} differs"
                for path in (folder / model / "one").iterdir()
                if path.read_bytes() != (target / path.name).read_bytes()
            ]
        for name, layout in named.items():
            mine = spread(spec, Mesh(layout), dtype=torch.bfloat16, seed=3)
            load(mine.decoder, folder / model / "tp2-pp2", holdings=mine.holdings)
            for own, value in mine.decoder.named_parameters():
                if not torch.equal(value, mine.holdings[own].take(whole(model)[own])):
                    faults.append(f"{model} {name}: {own}")
    return faults


def one_piece(model: Model, name: str) -> Decoder:
    decoder = build(model, dtype=torch.bfloat16)
    materialise(decoder, "cpu")
    with torch.no_grad():
        for own, value in decoder.named_parameters():
            value.copy_(whole(name)[own])
    return decoder


@pytest.mark.slow
def test_an_export_is_the_same_from_every_layout_and_loads_under_every_other(
    tmp_path: Path,
) -> None:
    for name, model in MODELS.items():
        save(one_piece(model, name), tmp_path / name / "one", shard_bytes=20_000)
    assert launch(4, export, tmp_path, timeout_s=170) == [[], [], [], []]


def moments(mine: Spread, *, filled: bool) -> dict[str, Placed | BlockScales]:
    """Return 8-bit moments of what a rank holds, coded as its optimizer would, or zeros."""
    found: dict[str, Placed | BlockScales] = {}
    for name, holding in mine.holdings.items():
        values = holding.take(whole("dense", "second")[name]).contiguous()
        scales = plain_scales(values)
        half = torch.full_like(values, 1 << 23, dtype=torch.int64)
        codes = plain_encode(values, scales, half, torch.int8)
        if not filled:
            codes, scales = torch.zeros_like(codes), torch.zeros_like(scales)
        found[f"first.{name}"] = Placed.of(codes, holding)
        found[f"scale.{name}"] = BlockScales.of(scales, f"first.{name}", holding)
    return found


def blocks(folder: Path) -> list[str]:
    """Save 8-bit moments, load them under other layouts, and say what is not as it was."""
    torch.set_num_threads(1)
    told = []
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, moments(of_dense("tp2-dp2"), filled=True), {})
        for name in ("tp2-dp2", "tp2-pp2", "tp4"):
            mine = of_dense(name)
            into, coded = moments(mine, filled=False), moments(mine, filled=True)
            checkpoints.load(into)
            for own in mine.holdings:
                pair = [(state[f"first.{own}"], state[f"scale.{own}"]) for state in (into, coded)]
                here, there = (plain_decode(codes.tensor, scale.tensor) for codes, scale in pair)
                # Stages hold other parameters, and each of them as before.
                same = torch.equal(here, there) if name != "tp4" else close(here, there)
                told += [] if same else [f"{name}: {own}"]
    return told


def of_dense(name: str) -> Spread:
    return spread(MODELS["dense"], Mesh(LAYOUTS[name]), dtype=torch.bfloat16)


def close(here: Tensor, there: Tensor) -> bool:
    """Tell whether codes are as near as two roundings leave them, each by half a code."""
    largest = float(there.abs().max())
    return bool(((here - there).abs() <= (there.abs() / 7).clamp(min=2**-16 * largest)).all())


@pytest.mark.slow
def test_moments_of_eight_bits_move_between_layouts(tmp_path: Path) -> None:
    assert launch(4, blocks, tmp_path) == [[], [], [], []]
