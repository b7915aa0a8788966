"""What drawing the next tokens costs on the GPU, beside torch's own operations for the same job.

The floor of every row is one read of the logits at the bandwidth of torch's `copy_`. Peers are what
engines do without kernels of their own: `argmax`, exponential noise over softmax, and a sort of the
vocabulary for top-k and top-p. Kernels are also held against plain torch: tokens and cuts.

    PYTHONPATH=src:. python3 -m benchmarks.sampling [--quick] [--out FILE]
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benchmarks.decode_cases import copy_bytes_per_s, graph_s
from benchmarks.result import figure
from meshwright.errors import MissingDependency

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.run.serve.sampling.sampler import TokenSampler
    from meshwright.run.serve.sampling_params import SamplingParams

NAME = "sampling"
QUESTION = "What does drawing the next tokens cost on the GPU?"

VOCAB = 151_936
"""Of Qwen3."""
LINES = (1, 32, 256)
PLAIN_TARGET = "<= 2"
"""Reads of the logits that greedy and plain temperature may cost, at 256 lines."""

Figures = list[dict[str, object]]
Calls = list[Callable[[], object]]


def ways() -> "dict[str, SamplingParams]":
    """Return what is measured, by name."""
    from meshwright.run.serve.sampling_params import SamplingParams

    return {
        "greedy": SamplingParams(temperature=0),
        "temperature": SamplingParams(temperature=0.6, seed=1),
        "top-p 0.9": SamplingParams(top_p=0.9, seed=1),
        "top-k 50": SamplingParams(top_k=50, seed=1),
        "top-k, top-p, min-p": SamplingParams(top_k=50, top_p=0.9, min_p=0.02, seed=1),
        "penalties": SamplingParams(repetition_penalty=1.1, frequency_penalty=0.2, seed=1),
        "logprobs": SamplingParams(logprobs=5, seed=1),
    }


def logits_like(lines: int, vocab: int, device: str) -> "Tensor":
    """Return bfloat16 logits spread as those of trained models are: few tokens stand out."""
    import torch

    source = torch.Generator().manual_seed(lines)
    logits_LV = torch.randn(lines, vocab, generator=source) * 2.5
    some_LK = torch.randint(vocab, (lines, 300), generator=source)
    lift_LK = torch.rand(lines, 300, generator=source) ** 3 * 14
    return logits_LV.scatter_add_(1, some_LK, lift_LK).bfloat16().to(device)


def sampler_of(asked: "SamplingParams", lines: int, vocab: int, device: str) -> "TokenSampler":
    """Return a sampler with every row asking the same, each by its own seed."""
    from meshwright.run.serve.sampling.sampler import TokenSampler

    sampler = TokenSampler(lines, vocab, device)
    for row in range(lines):
        sampler.add_row(row, asked, range(500), range(100), choice=row)
    return sampler


def measure(quick: bool) -> dict[str, object]:
    """Measure on the GPU; without one, `quick` shows that everything works."""
    import torch

    if not torch.cuda.is_available():
        if not quick:
            raise MissingDependency("this benchmark needs a CUDA GPU", "run it with --quick")
        differing = sum(compare(3, 700, "cpu").values())
        return {"figures": [figure("lines that differ", differing, "lines", "<= 0")]}
    per_s = copy_bytes_per_s()
    figures = [figure("copy_", per_s / 1e12, "TB/s")]
    peers: Figures = []
    for name, count in compare(64, VOCAB, "cuda").items():
        figures.append(figure(f"lines of 64 that differ from plain torch, {name}", count, "lines"))
    for lines in LINES[-1:] if quick else LINES:
        logits_LV = logits_like(lines, VOCAB, "cuda")
        read_s = logits_LV.nbytes / per_s
        for name, asked in ways().items():
            taken_s = graph_s(_ours(asked, logits_LV.clone()))
            label = f"{name}, {lines} lines"
            promised = PLAIN_TARGET if name in ("greedy", "temperature") and lines > 32 else ""
            figures.append(figure(label, taken_s * 1e6, "µs"))
            figures.append(figure(label, taken_s / read_s, "reads of the logits", promised))
        for name, call in peers_of(logits_LV):
            peers.append(figure(f"{name}, {lines} lines", graph_s([call]) * 1e6, "µs"))
    notes = f"{VOCAB} tokens, bfloat16, calls in one CUDA graph, torch {torch.__version__}."
    return {"figures": figures, "peers": peers, "notes": notes}


def _ours(asked: "SamplingParams", logits_LV: "Tensor") -> Calls:
    lines, vocab = logits_LV.shape
    sampler = sampler_of(asked, lines, vocab, "cuda")
    plan = sampler.build_metadata(range(lines))
    return [partial(sampler.sample, logits_LV, plan)]


def peers_of(logits_LV: "Tensor") -> "Iterator[tuple[str, Callable[[], object]]]":
    """Yield the same jobs in torch's own operations."""
    import torch

    def drawn(scaled_LV: "Tensor") -> "Tensor":
        chances_LV = scaled_LV.softmax(1)
        noise_LV = torch.empty_like(chances_LV).exponential_()
        return (chances_LV / noise_LV).argmax(1)

    def sorted_cut() -> "Tensor":
        ascending_LV, index_LV = logits_LV.float().sort(dim=1)
        ascending_LV.masked_fill_(ascending_LV < ascending_LV[:, -50:-49], -torch.inf)
        below_LV = ascending_LV.softmax(1).cumsum(1) <= 1 - 0.9
        below_LV[:, -1] = False
        ascending_LV.masked_fill_(below_LV, -torch.inf)
        return drawn(torch.empty_like(ascending_LV).scatter_(1, index_LV, ascending_LV))

    yield "torch argmax", lambda: logits_LV.argmax(1)
    yield "torch temperature", lambda: drawn(logits_LV.float() / 0.6)
    yield "torch top-k, top-p by sorting", sorted_cut


def compare(lines: int, vocab: int, device: str) -> dict[str, int]:
    """Count lines whose token or cut is not the one that plain torch finds."""
    from meshwright.run.kernels.sampling.gumbel_argmax import sample_gumbel_argmax
    from meshwright.run.kernels.sampling.top_k_top_p import compute_logit_thresholds

    logits_LV = logits_like(lines, vocab, device)
    differing = {}
    for name, asked in ways().items():
        sampler = sampler_of(asked, lines, vocab, device)
        places = sampler.build_metadata(range(lines)).logit_rows
        found, exact = (
            compute_logit_thresholds(logits_LV, places, sampler.row_params, backend=backend)
            for backend in ("triton", "torch")
        )
        kept_L, exact_L = ((logits_LV >= each[:, None]).sum(1) for each in (found, exact))
        tokens_L, exact_tokens_L = (
            sample_gumbel_argmax(logits_LV, places, sampler.row_params, exact, backend=backend)
            for backend in ("triton", "torch")
        )
        differing[name] = int(((kept_L != exact_L) | (tokens_L != exact_tokens_L)).sum())
    return differing


def main() -> None:
    """Measure, print, and write what was measured as JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.sampling", description=QUESTION)
    parser.add_argument("--out", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="256 lines only")
    arguments = parser.parse_args()
    text = msgspec.json.format(msgspec.json.encode(measure(arguments.quick)), indent=2)
    if arguments.out is not None:
        arguments.out.write_bytes(text + b"\n")
    print(text.decode())


if __name__ == "__main__":
    main()
