"""How fast batches come from tokenised text, beside Megatron's dataset and plain torch.

One corpus of random tokens in documents as long as web text, written once in our format and once in
Megatron's; everything reads it from the page cache. A worker is one thread of ours, or one process
of a torch DataLoader. Each stage runs in a process of its own.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAME = "train_data"
QUESTION = "How many tokens per second does a worker read, and does training wait for them?"

LENGTH = 4096
BATCH = 8
VOCABULARY = 50_000
MEDIAN, SIGMA = 400, 1.2
CONSUMED_PER_S = 256e3
"""What the busy consumer trains: four times a 1B model on one H200 (64,016 tokens/s)."""


def documents(tokens: int) -> Iterator[Any]:
    """Yield documents of log-normal lengths, each ended by 0."""
    import numpy as np

    draw = np.random.default_rng(7)
    done = 0
    while done < tokens:
        count = int(draw.lognormal(np.log(MEDIAN), SIGMA)) + 1
        done += count + 1
        yield np.append(draw.integers(1, VOCABULARY, count), 0)


def prepare(folder: Path, tokens: int) -> None:
    """Write the corpus in both formats."""
    from meshwright.run.train.data import Vocabulary, write_megatron, write_token_shards

    vocabulary = Vocabulary(name="random", size=VOCABULARY, digest="random", eos=0)
    corpus = write_token_shards(
        documents(tokens), folder / "shards", vocabulary, shard_bytes=1 << 26
    )
    write_megatron(corpus, folder / "pair")


def _batches(folder: Path, packing: Any, length: int = LENGTH, batch: int = BATCH) -> Any:
    from meshwright.run.train.data import DataConfig, build_dataset
    from meshwright.spec.workload import TrainingWorkload

    training = TrainingWorkload(
        tokens=10**9, sequence_length=length, global_batch=batch, packing=packing
    )
    return build_dataset(DataConfig(sources=(str(folder / "shards"),)), training, seed=1)


def _drained(loader: Any, steps: int) -> dict[str, float]:
    """Take batches as fast as they come; the first ones are not counted."""
    import torch

    def tokens(batch: Any) -> int:
        found = batch["tokens"] if isinstance(batch, dict) else batch.tokens_BT
        assert isinstance(found, torch.Tensor)
        return found.numel()

    for _ in range(3):
        next(loader)
    began = time.perf_counter()
    count = sum(tokens(next(loader)) for _ in range(steps))
    return {"tokens_per_s": count / (time.perf_counter() - began)}


def stage_open(folder: Path, _steps: int) -> dict[str, float]:
    """Pack the corpus, then open it again."""
    _batches(folder, "concat")  # imports what is needed
    began = time.perf_counter()
    first = _batches(folder, "pack")
    made = time.perf_counter()
    _batches(folder, "pack")
    again = time.perf_counter()
    stream = first.streams[0]
    filled = stream.corpus.num_tokens / (stream.packing.sequences * LENGTH)
    return {
        "pack_s": made - began,
        "open_s": again - made,
        "documents": stream.corpus.num_documents,
        "filled": filled,
    }


def stage_pack(folder: Path, steps: int) -> dict[str, float]:
    """One worker, packed documents."""
    return _drained(_batches(folder, "pack").iterate(), steps)


def stage_concat(folder: Path, steps: int) -> dict[str, float]:
    """One worker, documents end to end."""
    return _drained(_batches(folder, "concat").iterate(), steps)


def stage_short(folder: Path, steps: int) -> dict[str, float]:
    """One worker, packed documents in short sequences."""
    return _drained(_batches(folder, "pack", 512, 64).iterate(), steps)


def stage_wait(folder: Path, steps: int) -> dict[str, float]:
    """A consumer that is busy with matrix products for a fixed time per step."""
    import torch

    torch.set_num_threads(1)
    one = torch.randn(256, 256)
    busy_s = LENGTH * BATCH / CONSUMED_PER_S
    with _batches(folder, "pack").iterate() as loader:
        next(loader)
        loader.total_wait_s = 0.0
        began = time.perf_counter()
        for _ in range(steps // 4):
            next(loader)
            until = time.perf_counter() + busy_s
            while time.perf_counter() < until:
                torch.mm(one, one)
        whole = time.perf_counter() - began
        return {"share": loader.total_wait_s / whole}


class _Tokenizer:
    """What Megatron asks of a tokenizer."""

    eod = eos = 0
    pad = -1
    vocab_size = VOCABULARY
    unique_identifiers = {"class": "none"}  # noqa: RUF012 - Megatron reads it as an attribute


def _megatron(folder: Path, *, restart: bool) -> Any:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=LENGTH,
        blend=([str(folder / "pair")], None),
        split="1,0,0",
        path_to_cache=str(folder / "cache"),
        tokenizer=_Tokenizer(),
        reset_position_ids=restart,
        reset_attention_mask=False,
        eod_mask_loss=restart,
        create_attention_mask=False,
    )
    import numpy as np

    low = GPTDataset.build_low_level_dataset(str(folder / "pair"), config)
    every = np.arange(GPTDataset.numel_low_level_dataset(low), dtype=np.int32)
    return GPTDataset(low, str(folder / "pair"), every, None, Split.train, config)


def _torch_loader(dataset: Any, workers: int) -> Any:
    from itertools import chain, repeat

    import torch

    loader: Any = torch.utils.data.DataLoader(
        dataset, batch_size=BATCH, num_workers=workers, drop_last=True,
        prefetch_factor=4 if workers else None, persistent_workers=workers > 0,
    )  # fmt: skip
    return chain.from_iterable(repeat(loader))


def peer_megatron_open(folder: Path, _steps: int) -> dict[str, float]:
    """Megatron's indices: built, then opened from its cache."""
    _megatron(folder, restart=False)  # builds them; imports and compiles what it needs
    began = time.perf_counter()
    _megatron(folder, restart=False)
    return {"open_s": time.perf_counter() - began}


def peer_megatron(folder: Path, steps: int) -> dict[str, float]:
    """Megatron's GPTDataset in one DataLoader process, documents end to end."""
    return _drained(_torch_loader(_megatron(folder, restart=False), 1), steps)


def peer_megatron_restart(folder: Path, steps: int) -> dict[str, float]:
    """The same with positions that restart and losses masked at the end of documents."""
    return _drained(_torch_loader(_megatron(folder, restart=True), 1), steps)


def peer_torch(folder: Path, steps: int) -> dict[str, float]:
    """Windows at random places of one memory map, by a plain DataLoader process."""
    import numpy as np
    import torch

    stream = np.memmap(folder / "pair.bin", np.uint16, "r")
    order = np.random.default_rng(1).permutation((len(stream) - 1) // LENGTH)

    class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return len(order)

        def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
            first = int(order[place]) * LENGTH
            row = torch.from_numpy(stream[first : first + LENGTH + 1].astype(np.int64))
            return {"tokens": row[:-1], "labels": row[1:]}

    return _drained(_torch_loader(Windows(), 1), steps)


def stage_tokenise(folder: Path, steps: int) -> dict[str, float]:
    """Text to shards, with bytes and with a BPE, on all cores."""
    from meshwright.run.train.data import (
        generate_builtin_documents,
        open_tokenizer,
        tokenize_files,
        train_bpe,
    )
    from meshwright.run.train.data.tokenization import corpus_tokenization
    from meshwright.run.train.data.tokenization.bpe_trainer import save_tokenizer

    corpus_tokenization.MIN_SHARD_BYTES = 1 << 20
    texts = list(generate_builtin_documents(8_000_000 if steps > 50 else 1_000_000))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    size = sum(len(one.encode()) for one in texts)
    save_tokenizer(train_bpe(texts[:400], 8192), folder / "bpe.json")
    found: dict[str, float] = {"megabytes": size / 1e6}
    for name in ("bytes", str(folder / "bpe.json")):
        tokenizer = open_tokenizer(name)
        began = time.perf_counter()
        made = tokenize_files(
            [str(folder / "text.jsonl")], folder / f"out-{Path(name).stem}", tokenizer
        )
        found[Path(name).stem] = size / 1e6 / (time.perf_counter() - began)
        found[f"{Path(name).stem}_tokens"] = made.tokens
    return found


def peer_tokenizers(folder: Path, _steps: int) -> dict[str, float]:
    """The library's own encode_batch over texts in memory, on all cores, writing nothing."""
    from tokenizers import Tokenizer

    lines = (folder / "text.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    tokenizer = Tokenizer.from_file(str(folder / "bpe.json"))
    began = time.perf_counter()
    tokenizer.encode_batch(texts, add_special_tokens=False)
    size = sum(len(one.encode()) for one in texts)
    return {"megabytes_per_s": size / 1e6 / (time.perf_counter() - began)}


def _run(stage: str, folder: Path, steps: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.train_data", "--stage", stage, str(folder)]
    done = subprocess.run(
        [*command, "--steps", str(steps)], check=True, capture_output=True, text=True,
        cwd=Path(__file__).resolve().parent.parent,
    )  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


OURS = ("stage_open", "stage_pack", "stage_concat", "stage_short", "stage_wait", "stage_tokenise")
PEERS = (
    "peer_megatron_open", "peer_megatron", "peer_megatron_restart", "peer_torch", "peer_tokenizers"
)  # fmt: skip


def measure(quick: bool) -> dict[str, object]:
    """Measure 100 million tokens, or two."""
    tokens, steps = (2_000_000, 20) if quick else (100_000_000, 400)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, tokens)
        ours = {stage: _run(stage, folder, steps) for stage in OURS}
        peers = {stage: _run(stage, folder, steps) for stage in PEERS}

    def figure(name: str, value: float, unit: str, target: str = "") -> dict[str, object]:
        short = float(f"{value:.4g}")
        promise = {"target": target} if target and not quick else {}
        return {"name": name, "value": short, "unit": unit} | promise

    def rate(name: str, found: dict[str, float], target: str = "") -> dict[str, object]:
        return figure(name, found["tokens_per_s"] / 1e6, "Mtokens/s", target)

    opened, made = ours["stage_open"], ours["stage_tokenise"]
    return {
        "figures": [
            rate("packed documents, one worker", ours["stage_pack"], ">= 5"),
            rate("documents end to end, one worker", ours["stage_concat"], ">= 5"),
            rate("packed in sequences of 512, one worker", ours["stage_short"], ">= 5"),
            figure("share of a busy consumer's time spent waiting",
                   100 * ours["stage_wait"]["share"], "%", "< 1"),
            figure("plan the packing", opened["pack_s"] / opened["documents"] * 1e6,
                   "µs/document"),
            figure("open a corpus that has a plan", opened["open_s"] * 1e3, "ms"),
            figure("positions that hold a token", 100 * opened["filled"], "%", "> 99.5"),
            figure("tokenise to bytes", made["bytes"], "MB/s"),
            figure("tokenise with a BPE of 8,192", made["bpe"], "MB/s"),
        ],
        "peers": [
            rate("Megatron GPTDataset, one DataLoader process", peers["peer_megatron"]),
            rate("the same, positions restarting", peers["peer_megatron_restart"]),
            rate("windows of a memory map, one DataLoader process", peers["peer_torch"]),
            figure("Megatron: open indices from its cache",
                   peers["peer_megatron_open"]["open_s"] * 1e3, "ms"),
            figure("tokenizers.encode_batch alone, nothing written",
                   peers["peer_tokenizers"]["megabytes_per_s"], "MB/s"),
        ],
        "notes": (
            f"{tokens:,} random uint16 tokens in documents of log-normal length (median {MEDIAN}, "
            f"sigma {SIGMA}), {BATCH} sequences of {LENGTH} to a step, read from the page cache. "
            "Rates count positions. Ours includes labels, positions and document starts, made by "
            "one thread; a DataLoader process also sends its batch to the parent. The busy "
            f"consumer takes {CONSUMED_PER_S:,.0f} tokens/s. Text for tokenising is Python's own "
            f"({made['megabytes']:.0f} MB), over all cores, start of the processes included."
        ),
    }  # fmt: skip


def main() -> None:
    """Measure and print, or run one stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", nargs=2, metavar=("STAGE", "FOLDER"))
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    if not arguments.stage:
        print(json.dumps(measure(quick=False), indent=2, ensure_ascii=False))
        return
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    stage, folder = arguments.stage
    print(json.dumps(globals()[stage](Path(folder), arguments.steps)), flush=True)
    # DataLoader processes are torn down by the system, not by torch's slow exit.
    os._exit(0)


if __name__ == "__main__":
    main()
