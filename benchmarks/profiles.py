"""Makes profiles and memory snapshots of a small GPT on this machine's GPU, with known faults.

    python -m benchmarks.profiles DIR

`DIR` gets one trace for each fault, `memory/` snapshots and their truths. What each holds is said
beside its function, so that `mw analyze` and `mw memory` can be held against it. Without a GPU the
same runs at a tiny size, which shows that the program works and nothing else.
"""

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function, schedule

VOCABULARY = 8192
LOAD_S = 0.03
SMALL_TOKENS = 64
REPLAYS = 10
LEAKED_BYTES = 16 << 20
LIMIT_BYTES = 6 << 30


class Size(NamedTuple):
    """The model and its batch."""

    hidden: int
    layers: int
    heads: int
    sequence: int
    batch: int


ON_GPU = Size(hidden=1024, layers=8, heads=16, sequence=1024, batch=8)
ON_CPU = Size(hidden=64, layers=2, heads=4, sequence=32, batch=2)


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, self.heads = size.hidden, size.heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in parts
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        return fed


class Loop:
    """A model with its optimizer, and one step of training."""

    def __init__(self, size: Size, device: str) -> None:
        torch.manual_seed(0)
        self.size, self.device = size, device
        self.model: nn.Module = nn.Sequential(
            nn.Embedding(VOCABULARY, size.hidden),
            *(Block(size) for _ in range(size.layers)),
            nn.Linear(size.hidden, VOCABULARY, bias=False),
        ).to(device, torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=device == "cuda")

    def tokens(self, batch: int, length: int, device: str | None = None) -> Tensor:
        """Random ones."""
        return torch.randint(0, VOCABULARY, (batch, length), device=device or self.device)

    def step(self, tokens: Tensor) -> Tensor:
        """Forward, backward, update; the loss."""
        logits = self.model(tokens).float().view(-1, VOCABULARY)
        loss = functional.cross_entropy(logits, tokens.view(-1))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss


def traced(path: Path, body: Callable[[], object], steps: int = 3, **how: Any) -> None:
    """Profile some steps, after two that are not recorded."""
    for _ in range(2):
        body()
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
        on_trace_ready=lambda found: found.export_chrome_trace(str(path)),
        **how,
    ) as profiler:
        for _ in range(steps + 1):
            body()
            profiler.step()
    sys.stdout.write(f"{path}\n")


def traces(folder: Path, size: Size, device: str) -> None:
    """One trace for each fault."""
    loop = Loop(size, device)
    batch = loop.tokens(size.batch, size.sequence)
    small = loop.tokens(1, min(SMALL_TOKENS, size.sequence))

    def slow_loader() -> None:
        with record_function("load"):
            time.sleep(LOAD_S)
        loop.step(loop.tokens(size.batch, size.sequence, "cpu").to(device))

    traced(folder / "eager_shapes.json.gz", lambda: loop.step(batch), record_shapes=True)
    traced(
        folder / "eager_stack.json.gz", lambda: loop.step(batch), 1,
        record_shapes=True, with_stack=True,
    )  # fmt: skip
    traced(folder / "eager_item.json.gz", lambda: loop.step(batch).item())
    traced(folder / "slow_loader.json.gz", slow_loader)
    traced(folder / "launch_bound.json.gz", lambda: loop.step(small))
    if device == "cuda":
        _graphed(folder / "graphed.json.gz", loop, small)
        loop.model.compile()
        traced(folder / "compiled.json.gz", lambda: loop.step(batch))


def _graphed(path: Path, loop: Loop, tokens: Tensor) -> None:
    """Replays of a graph of the forward pass, then a synchronization, each step."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        loop.model(tokens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop.model(tokens)

    def replay() -> None:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()

    traced(path, replay)


def snapshots(folder: Path, size: Size) -> None:
    """A plain run, one that keeps a loss and 16 MiB each step, and one that runs out of memory."""
    kept: list[Tensor] = []
    whole = torch.cuda.get_device_properties(0).total_memory

    def plain() -> None:
        loop = Loop(size, "cuda")
        for _ in range(3):
            loop.step(loop.tokens(size.batch, size.sequence))

    def leak() -> None:
        loop = Loop(size, "cuda")
        for _ in range(5):
            kept.append(loop.step(loop.tokens(size.batch, size.sequence)))
            kept.append(torch.zeros(LEAKED_BYTES // 4, device="cuda"))

    def shortage() -> None:
        kept.clear()
        torch.cuda.set_per_process_memory_fraction(LIMIT_BYTES / whole)
        loop = Loop(size, "cuda")
        for batch in (4, 8, 16, 32, 64):
            loop.step(loop.tokens(batch, size.sequence))

    folder.mkdir(parents=True, exist_ok=True)
    cases = {"plain": plain, "leak": leak, "oom": shortage}
    truth = {name: _snapshot(folder / f"{name}.pickle", body) for name, body in cases.items()}
    (folder / "truth.json").write_text(json.dumps(truth, indent=1) + "\n", encoding="utf-8")


def _snapshot(path: Path, body: Callable[[], None]) -> dict[str, int | str | None]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(max_entries=200_000)  # noqa: SLF001  no public name
    error = None
    try:
        body()
    except torch.OutOfMemoryError as shortage:
        error = str(shortage)
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]  # noqa: SLF001
    torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001
    sys.stdout.write(f"{path}\n")
    return {
        "peak": torch.cuda.max_memory_allocated(),
        "active": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "error": error,
    }


def main() -> None:
    """Make all of it."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    if torch.cuda.is_available():
        traces(folder, ON_GPU, "cuda")
        snapshots(folder / "memory", ON_GPU)
    else:
        traces(folder, ON_CPU, "cpu")


if __name__ == "__main__":
    main()
