"""A rank reads its own parts of a checkpoint, and no tensor it has no part of."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.errors import InputError
from meshwright.run.nn.build import build
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.holding import Holding
from meshwright.run.nn.huggingface import load, save
from meshwright.run.nn.huggingface.checkpoint import Checkpoint
from meshwright.run.nn.huggingface.families import families
from meshwright.run.parallel.holdings import holdings
from meshwright.run.parallel.spread import hold
from meshwright.run.parallel.stage import keep_layers
from meshwright.spec.layout import Layout
from meshwright.spec.layout.ranks import coordinate
from meshwright.spec.layout.stages import rank_chunks
from meshwright.spec.model import Model
from meshwright.spec.model.huggingface import read_config
from tests.run.nn.huggingface.drawn import DRAWS, draw
from tests.run.nn.huggingface.test_load import LLAMA, made

MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
TENSORS = Layout(tp=2)
EXPERTS = Layout(tp=1, dp=2, ep=2)
STAGES = Layout(pp=2)


def part(model: Model, layout: Layout, rank: int) -> tuple[Decoder, dict[str, Holding]]:
    """Return what a rank has of a model, without memory."""
    decoder = build(model, dtype=torch.float32)
    held = holdings(decoder, layout, rank)
    if layout.pp > 1:
        keep_layers(decoder, rank_chunks(layout, model.layers)[coordinate(layout, rank).pp])
    held = {name: held[name] for name, _ in decoder.named_parameters()}
    hold(decoder, held)
    return decoder, held


def check(model: Model, layout: Layout, folder: Path, whole: Decoder) -> None:
    wanted = dict(whole.named_parameters())
    for rank in range(layout.gpus):
        decoder, held = part(model, layout, rank)
        load(decoder, folder, holdings=held)
        for name, value in decoder.named_parameters():
            assert torch.equal(value, held[name].take(wanted[name])), f"rank {rank}: {name}"


@pytest.mark.parametrize("family", [name for name in families() if name in DRAWS])
def test_every_family_comes_in_parts_as_it_comes_whole(family: str, tmp_path: Path) -> None:
    model = read_config({**draw(family, 1), "model_type": family})
    whole = made(model)
    with torch.no_grad():
        for number, parameter in enumerate(whole.parameters()):
            parameter.copy_(torch.randn(parameter.shape) + number)
    save(whole, tmp_path)
    for layout in (TENSORS, EXPERTS, STAGES):
        check(model, layout, tmp_path, load(model, tmp_path, dtype=torch.float32))


@pytest.mark.parametrize(("layout", "missing"), [(EXPERTS, "experts.0."), (STAGES, "layers.0.")])
def test_what_a_rank_has_no_part_of_is_not_read(
    layout: Layout, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = read_config(MIXTRAL)
    save(made(model), tmp_path)
    read: list[str] = []
    original = Checkpoint.read

    def noted(self: Checkpoint, name: str, device: torch.device) -> Tensor:
        read.append(name)
        return original(self, name, device)

    monkeypatch.setattr(Checkpoint, "read", noted)
    decoder, held = part(model, layout, 1)
    load(decoder, tmp_path, holdings=held)
    assert read
    assert not any(missing in name for name in read)


def test_a_rank_names_what_it_misses_and_what_no_rank_would_read(tmp_path: Path) -> None:
    model = read_config(LLAMA)
    save(made(model), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(24, 16)
    save_file(tensors, tmp_path / "model.safetensors")
    found = []
    for rank in range(2):
        decoder, held = part(model, STAGES, rank)
        with pytest.raises(InputError) as caught:
            load(decoder, tmp_path, holdings=held)
        found.append({each.where.rsplit(": ", 1)[1]: each.what for each in caught.value.problems})
    strange = {
        "model.layers.2.mlp.up_proj.weight": "a llama model of this shape has no such tensor"
    }
    missing = "is missing; it fills layers.1.mlp.gate_up.weight"
    assert found == [strange, {"model.layers.1.mlp.up_proj.weight": missing, **strange}]


def test_parameters_are_asked_for_one_at_a_time_and_written_alike(tmp_path: Path) -> None:
    model = read_config(MIXTRAL)
    whole = made(model)
    values = dict(whole.named_parameters())
    asked: list[str] = []

    def give(name: str) -> Tensor:
        asked.append(name)
        return values[name]

    save(whole, tmp_path / "one", shard_bytes=4000)
    save(build(model, dtype=torch.float32), tmp_path / "many", shard_bytes=4000, whole=give)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "many" / path.name).read_bytes()
    assert sorted(asked) == sorted(values)


def test_a_rank_without_the_parameters_writes_nothing(tmp_path: Path) -> None:
    save(build(read_config(LLAMA)), tmp_path / "none", whole=lambda _: None)
    assert not (tmp_path / "none").exists()


def test_a_full_disk_is_told_once_all_parameters_were_asked_for(tmp_path: Path) -> None:
    values = dict(made(read_config(LLAMA)).named_parameters())
    asked: list[str] = []

    def give(name: str) -> Tensor:
        asked.append(name)
        return values[name]

    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    with pytest.raises(OSError, match="file"):
        save(build(read_config(LLAMA)), blocked, whole=give, shard_bytes=4000)
    assert set(asked) == set(values)
