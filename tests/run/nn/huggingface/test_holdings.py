"""A rank reads its own parts of a checkpoint, and no tensor it has no part of."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.errors import InputError
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.huggingface import load_hf_checkpoint, save_hf_checkpoint
from meshwright.run.nn.huggingface.model_registry import list_model_types
from meshwright.run.nn.huggingface.safetensors_folder import SafetensorsFolder
from meshwright.run.nn.sharding.shard_spec import ShardSpec
from meshwright.run.parallel.pipeline_parallel.pipeline_stage import drop_other_stages
from meshwright.run.parallel.shard_specs import make_shard_specs
from meshwright.run.parallel.sharded_model import shrink_parameters
from meshwright.spec.layout import Layout
from meshwright.spec.layout.pipeline_chunks import list_chunks_by_rank
from meshwright.spec.layout.ranks import get_coordinate
from meshwright.spec.model import Model
from meshwright.spec.model.huggingface import read_config
from tests.run.nn.huggingface.drawn import DRAWS, draw
from tests.run.nn.huggingface.test_hf_loader import LLAMA, made

MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
TENSORS = Layout(tp=2)
EXPERTS = Layout(tp=1, dp=2, ep=2)
STAGES = Layout(pp=2)


def part(model: Model, layout: Layout, rank: int) -> tuple[Decoder, dict[str, ShardSpec]]:
    """Return what a rank has of a model, without memory."""
    decoder = build_decoder(model, dtype=torch.float32)
    held = make_shard_specs(decoder, layout, rank)
    if layout.pp > 1:
        drop_other_stages(
            decoder, list_chunks_by_rank(layout, model.layers)[get_coordinate(layout, rank).pp]
        )
    held = {name: held[name] for name, _ in decoder.named_parameters()}
    shrink_parameters(decoder, held)
    return decoder, held


def check(model: Model, layout: Layout, folder: Path, whole: Decoder) -> None:
    wanted = dict(whole.named_parameters())
    for rank in range(layout.gpus):
        decoder, held = part(model, layout, rank)
        load_hf_checkpoint(decoder, folder, shard_specs=held)
        for name, value in decoder.named_parameters():
            assert torch.equal(value, held[name].select_local(wanted[name])), f"rank {rank}: {name}"


@pytest.mark.parametrize("family", [name for name in list_model_types() if name in DRAWS])
def test_every_family_comes_in_parts_as_it_comes_whole(family: str, tmp_path: Path) -> None:
    model = read_config({**draw(family, 1), "model_type": family})
    whole = made(model)
    with torch.no_grad():
        for number, parameter in enumerate(whole.parameters()):
            parameter.copy_(torch.randn(parameter.shape) + number)
    save_hf_checkpoint(whole, tmp_path)
    for layout in (TENSORS, EXPERTS, STAGES):
        check(model, layout, tmp_path, load_hf_checkpoint(model, tmp_path, dtype=torch.float32))


@pytest.mark.parametrize(("layout", "missing"), [(EXPERTS, "experts.0."), (STAGES, "layers.0.")])
def test_what_a_rank_has_no_part_of_is_not_read(
    layout: Layout, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = read_config(MIXTRAL)
    save_hf_checkpoint(made(model), tmp_path)
    read: list[str] = []
    original = SafetensorsFolder.read

    def noted(self: SafetensorsFolder, name: str, device: torch.device) -> Tensor:
        read.append(name)
        return original(self, name, device)

    monkeypatch.setattr(SafetensorsFolder, "read", noted)
    decoder, held = part(model, layout, 1)
    load_hf_checkpoint(decoder, tmp_path, shard_specs=held)
    assert read
    assert not any(missing in name for name in read)


def test_a_rank_names_what_it_misses_and_what_no_rank_would_read(tmp_path: Path) -> None:
    model = read_config(LLAMA)
    save_hf_checkpoint(made(model), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(24, 16)
    save_file(tensors, tmp_path / "model.safetensors")
    found = []
    for rank in range(2):
        decoder, held = part(model, STAGES, rank)
        with pytest.raises(InputError) as caught:
            load_hf_checkpoint(decoder, tmp_path, shard_specs=held)
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

    save_hf_checkpoint(whole, tmp_path / "one", shard_bytes=4000)
    save_hf_checkpoint(
        build_decoder(model, dtype=torch.float32), tmp_path / "many", shard_bytes=4000, whole=give
    )
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "many" / path.name).read_bytes()
    assert sorted(asked) == sorted(values)


def test_a_rank_without_the_parameters_writes_nothing(tmp_path: Path) -> None:
    save_hf_checkpoint(build_decoder(read_config(LLAMA)), tmp_path / "none", whole=lambda _: None)
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
        save_hf_checkpoint(build_decoder(read_config(LLAMA)), blocked, whole=give, shard_bytes=4000)
    assert set(asked) == set(values)


def test_a_file_that_names_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    entry = b'"a":{"dtype":"%b","shape":[2],"data_offsets":[0,8]}'
    header = b"{" + entry % b"F32" + b"," + entry % b"I32" + b"}"
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert load_file(file)["a"].dtype == torch.int32, "the library takes it for a sound file"
    with pytest.raises(InputError, match=r"model\.safetensors: has 'a' twice"):
        SafetensorsFolder(tmp_path)
