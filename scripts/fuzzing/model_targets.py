"""Targets of `scripts.fuzz_coverage`: models, tokenizers, topologies, settings and data sets."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from meshwright.errors import InputError
from meshwright.policy.collective.formats.collective_json import read_collective_json
from meshwright.policy.collective.formats.msccl_xml import read_msccl_xml
from meshwright.run.nn.huggingface.safetensors_folder import SafetensorsFolder
from meshwright.run.posttrain.data.records import read_records
from meshwright.run.serve.model.gguf_file import GgufFile, is_gguf, read_context_length
from meshwright.run.serve.model.gguf_weights import model_from_gguf
from meshwright.run.serve.model.peft_checkpoint import read_peft_checkpoint
from meshwright.run.serve.tokenizer.tokenizer import load_tokenizer
from meshwright.run.train.checkpoint.dcp_reader import CheckpointReader
from meshwright.run.train.checkpoint.metadata import METADATA_FILE, decode_extra, decode_metadata
from meshwright.run.train.data.tokenization.text_files import read_documents, split_file
from meshwright.run.train.data.tokenization.tokenizer import open_tokenizer
from meshwright.spec import catalog, file_formats
from meshwright.spec.cluster import (
    read_nccl_graphs,
    read_nccl_topology,
    read_nvidia_smi_topology,
    read_slurm_topology,
)
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.model import Model
from meshwright.spec.model.huggingface import load_config
from meshwright.spec.workload.request_trace import read_requests
from scripts.fuzzing import seed_files
from scripts.fuzzing.targets import Reader, SeedMaker

_TEXT = "a b 12 \u00e9\u65e5 <|im_start|> \t\n!"


def _each(*steps: Callable[[], object]) -> None:
    """Take every step, also where one before it refuses the file."""
    for step in steps:
        with suppress(InputError):
            step()


def _as(path: Path, name: str) -> Path:
    """Give the file another name, in a folder of its own."""
    folder = path.parent / "folder"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copy(path, folder / name)
    return folder / name


def _read_xml(path: Path) -> None:
    text = file_formats.read_text(path)
    _each(
        lambda: read_nccl_topology(text), lambda: read_nccl_graphs(text),
        lambda: read_msccl_xml(text),
    )  # fmt: skip


def _read_topology_text(path: Path) -> None:
    text = file_formats.read_text(path)
    _each(
        lambda: read_nvidia_smi_topology(text, catalog.get_gpu("h100")),
        lambda: read_slurm_topology(text).to_fabric("infiniband"),
    )


def _read_spec(path: Path) -> None:
    """Read a file as a job or a model, by the format that its first byte names."""
    data = path.read_bytes()
    ending = {b"{": ".json", b"-": ".yaml", b"#": ".yml"}.get(data[:1], ".toml")
    file = _as(path, f"case{ending}")
    _each(
        lambda: file_formats.load(JobSpec, file), lambda: file_formats.load(Model, file),
        lambda: read_collective_json(file_formats.read_text(file)),
    )  # fmt: skip


def _read_hf_config(path: Path) -> None:
    load_config(_as(path, "config.json"))


def _read_gguf(path: Path) -> None:
    file = _as(path, "model.gguf")
    read_context_length(file)
    assert is_gguf(file)
    _each(lambda: _tensors_of_gguf(file), lambda: load_tokenizer(file).encode(_TEXT))


def _tensors_of_gguf(path: Path) -> None:
    with GgufFile(path) as file:
        for name in file.names[:8]:
            file.shape(name)
            file.read(name)
        model_from_gguf(file)


def _read_safetensors(path: Path) -> None:
    file = _as(path, "model.safetensors")
    _each(lambda: _tensors_of_folder(file.parent))
    shutil.copy(path, file.parent / "adapter_model.safetensors")
    (file.parent / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    read_peft_checkpoint(file.parent)


def _tensors_of_folder(folder: Path) -> None:
    with SafetensorsFolder(folder) as opened:
        for name in list(opened.shapes)[:8]:
            if not opened.unreadable(name):
                opened.read(name, torch.device("cpu"))


def _read_tokenizer(path: Path) -> None:
    file = _as(path, "tokenizer.json")
    _each(lambda: _use_served_tokenizer(file.parent), lambda: _use_training_tokenizer(file))


def _use_served_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokens = tokenizer.encode(_TEXT)
    tokenizer.decode(tokens)
    for token in tokens[:4]:
        tokenizer.token_bytes(token)


def _use_training_tokenizer(file: Path) -> None:
    tokenizer = open_tokenizer(str(file))
    (tokens,) = tokenizer.encode([_TEXT])
    tokenizer.decode(tokens)


def _read_text_parquet(path: Path) -> None:
    file = _as(path, "case.parquet")
    _each(
        lambda: sum(1 for _ in read_records([file])),
        lambda: [sum(1 for _ in read_documents(part, "text")) for part in split_file(file, 100)],
    )


def _read_records(path: Path) -> None:
    file, packed = _as(path, "case.jsonl"), path.parent / "folder" / "case.jsonl.gz"
    shutil.copy(path, packed)
    table = path.parent / "folder" / "case.csv"
    shutil.copy(path, table)
    steps: list[Callable[[], object]] = [lambda: read_requests(table), lambda: read_requests(file)]
    for each in (file, packed):
        steps += [
            lambda each=each: sum(1 for _ in read_records([each])),  # type: ignore[misc]
            lambda each=each: [  # type: ignore[misc]
                sum(1 for _ in read_documents(part, "text")) for part in split_file(each, 100)
            ],
        ]
    _each(*steps)


def _read_checkpoint(path: Path) -> None:
    file = _as(path, METADATA_FILE)
    for rank in range(2):
        (file.parent / f"rank-0000{rank}.safetensors").write_bytes(bytes(112))
    CheckpointReader(file.parent).read_metadata()
    decode_extra(decode_metadata(file.read_bytes(), "case"))


READERS: dict[str, Reader] = {
    "xml": _read_xml,
    "topology_text": _read_topology_text,
    "spec": _read_spec,
    "hf_config": _read_hf_config,
    "gguf": _read_gguf,
    "safetensors": _read_safetensors,
    "tokenizer": _read_tokenizer,
    "text_parquet": _read_text_parquet,
    "records": _read_records,
    "checkpoint": _read_checkpoint,
}
SEEDS: dict[str, SeedMaker] = {
    "xml": seed_files.make_xml,
    "topology_text": seed_files.make_topology_text,
    "spec": seed_files.make_spec,
    "hf_config": seed_files.make_hf_config,
    "gguf": seed_files.make_gguf,
    "safetensors": seed_files.make_safetensors,
    "tokenizer": seed_files.make_tokenizer,
    "text_parquet": seed_files.make_text_parquet,
    "records": seed_files.make_records,
    "checkpoint": seed_files.make_checkpoint,
}
