"""A model and a text so small that a step takes milliseconds, as a job and as its file."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from meshwright.run.train.data import open_tokenizer, tokenize_files
from meshwright.run.train.job.job_file import read_job
from meshwright.run.train.job.train_job import TrainJob
from meshwright.spec.config_sources import ConfigSource, merge_sources
from meshwright.spec.file_formats import dump_data

STEPS = 12


def write_corpus(folder: Path) -> Path:
    """Tokenize three hundred short documents by their bytes."""
    text = folder / "text.jsonl"
    rows = [{"text": f"{n} times {n % 7} is {n * (n % 7)}. " * (1 + n % 3)} for n in range(300)]
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenize_files([str(text)], folder / "tokens", open_tokenizer("bytes"), workers=1)
    return folder / "tokens"


def job_data(corpus: Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a job of `STEPS` steps as plain data."""
    block = {
        "name": "dense",
        "mixer": {"kind": "attention", "heads": 2, "kv_heads": 1, "head_dim": 8, "rotary": {}},
        "mlp": {"kind": "mlp", "width": 32},
    }
    data = {
        "seed": 1,
        "model": {
            "name": "tiny",
            "hidden": 16,
            "vocab": 260,
            "pattern": "2*dense",
            "max_positions": 32,
            "blocks": [block],
        },
        "layout": {"precision": "fp32", "microbatch": 2},
        "workload": {
            "tokens": STEPS * 4 * 32,
            "sequence_length": 32,
            "global_batch": 4,
            "packing": "concat",
        },
        "data": {"sources": [str(corpus)], "validation_fraction": 0.1},
        "optimizer": {"lr": 0.01, "warmup_steps": 3},
        "eval": {"sequences": 5},
        "checkpoint": {"every_steps": 5},
        "logging": {"progress": "none"},
        "device": {"threads": 1, "type": "cpu"},
    }
    return merge_sources([ConfigSource("tiny", data), ConfigSource("changes", changes or {})]).data


def tiny_job(corpus: Path, changes: dict[str, Any] | None = None) -> TrainJob:
    return read_job(job_data(corpus, changes))


def write_job(path: Path, corpus: Path, changes: dict[str, Any] | None = None) -> Path:
    path.write_text(dump_data(job_data(corpus, changes), ".toml"))
    return path


def rows_of(run: Path, figure: str = "loss") -> dict[int, float]:
    """Return a figure of a run by step; a step that has it twice fails."""
    found: dict[int, float] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if figure in row:
            assert row["step"] not in found
            found[row["step"]] = row[figure]
    return found


def saved_steps(run: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in run.glob("checkpoints/0*"))


def saved_tensors(run: Path) -> dict[str, Tensor]:
    """Return what the newest checkpoint of a run holds."""
    newest = max(run.glob("checkpoints/0*"))
    return load_file(newest / "rank-00000.safetensors")


def bytes_saved(run: Path) -> bytes:
    newest = max(run.glob("checkpoints/0*"))
    return (newest / "rank-00000.safetensors").read_bytes()
