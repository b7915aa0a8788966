"""The training loop in one file: what `mw train` does, without its files, guards and outputs.

    python examples/train_loop.py

A model is described, built and given data and an optimizer; each step is one line. The model
learns to add: its text is made up of sums, and at the end it is asked for one.
"""

import json
import tempfile
from pathlib import Path

import torch

from meshwright.run.nn import Decoder
from meshwright.run.train.data import (
    BatchDataset,
    DataConfig,
    build_dataset,
    open_tokenizer,
    tokenize_files,
)
from meshwright.run.train.decoder_factory import make_decoder
from meshwright.run.train.optimizer import OptimizerConfig, make_optimizer
from meshwright.run.train.train_step import TrainStep
from meshwright.spec.layout import Layout
from meshwright.spec.model import AttentionSpec, BlockSpec, MLPSpec, Model, Rotary
from meshwright.spec.workload import TrainingWorkload

MODEL = Model(
    name="adder",
    hidden=96,
    vocab=260,  # every byte, and the ends of documents
    pattern="2*dense",
    max_positions=64,
    blocks=(
        BlockSpec(
            name="dense",
            mixer=AttentionSpec(heads=4, kv_heads=2, head_dim=24, rotary=Rotary()),
            mlp=MLPSpec(width=128),
        ),
    ),
)
LAYOUT = Layout(precision="fp32", microbatch=8)
WORKLOAD = TrainingWorkload(tokens=100_000, sequence_length=64, global_batch=8, packing="pack")


def sums(folder: Path) -> BatchDataset:
    """Write down the sums of digits, tokenize them, and open them as batches."""
    text = folder / "sums.jsonl"
    rows = (f"{a}+{b}={a + b}" for a in range(10) for b in range(10))
    text.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    tokenize_files([str(text)], folder / "tokens", open_tokenizer("bytes"), workers=1)
    return build_dataset(DataConfig(sources=(str(folder / "tokens"),)), WORKLOAD)


def trained(batches: BatchDataset, device: torch.device) -> Decoder:
    """Train a new model on all batches of the workload."""
    decoder = make_decoder(MODEL, LAYOUT, device=device, seed=0)
    settings = OptimizerConfig(lr=3e-3, warmup_steps=10)
    optimizer = make_optimizer(
        decoder.named_parameters(), LAYOUT, settings, total_steps=WORKLOAD.num_steps
    )
    step = TrainStep(decoder, optimizer, microbatch=LAYOUT.microbatch)
    with batches.iterate(until=WORKLOAD.num_steps, device=device) as loader:
        for number, batch in enumerate(loader):
            figures = step(batch, number)
            if number % 40 == 0 or number == WORKLOAD.num_steps - 1:
                loss, norm = figures.losses.mean_loss, figures.optimizer_report.grad_norm
                print(f"step {number + 1:4}  loss {float(loss):.3f}  gradient {float(norm):.2f}")
    return decoder


@torch.inference_mode()
def answer(decoder: Decoder, question: str, device: torch.device) -> str:
    """Let the model write until it ends the document, its likeliest byte each time."""
    tokenizer = open_tokenizer("bytes")
    ids = tokenizer.encode([question])[0].tolist()
    while len(ids) < 16:
        best = int(decoder(torch.tensor([ids], device=device))[0, -1].argmax())
        if best == tokenizer.vocabulary.eos:
            break
        ids.append(best)
    return tokenizer.decode(ids)


def main() -> None:
    """Train, then ask."""
    torch.set_num_threads(1)  # so small a model is fastest on one
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        decoder = trained(sums(Path(folder)), device)
    for question in ("2+2=", "7+5=", "9+9="):
        print(answer(decoder, question, device))


if __name__ == "__main__":
    main()
