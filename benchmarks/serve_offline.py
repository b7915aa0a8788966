"""Output tokens per second of the engine on one GPU, offline, with random weights.

The workload is the one that small engines are compared by: 256 prompts, lengths of prompts and
answers drawn evenly from 100 to 1,024 with the seed 0, answers that never end early; and 1,000
tokens in and out for the eight-billion model in fp8. Every shape runs in a process of its own, with
one prompt to warm up and then as often as it says; the median counts. `SERVE_SHAPES` in the
environment names some of the shapes, `SERVE_PEERS` a folder with results of peers measured in the
same session (JSON of name, shape and tokens per second).

    python -m benchmarks.serve_offline 1 1 320     # one run of the second shape, captured to 320
"""

import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.result import figure
from meshwright.errors import MissingDependency

NAME = "serve_offline"
QUESTION = "How many tokens does the engine write per second on one GPU, beside other engines?"


class Shape(NamedTuple):
    """A model and what it is asked."""

    name: str
    model: str
    quantization: Literal["none", "fp8"] = "none"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    requests: int = 256
    fixed: int | None = None
    """Tokens of every prompt and answer; None draws them."""
    at_a_time: int = 256
    max_num_batched_tokens: int = 16384
    """Tokens of a step at most, the best that `mw simulate serve` finds: prompts of a large model
    are cut up, so that answers which have begun read its weights with them; of a small one, not."""
    max_cudagraph_capture_size: int = 0
    """Steps with prompts are captured up to so many tokens: what the host takes to launch them no
    longer sets how short they can be, and short ones share a large model's weights the best."""
    runs: int = 3
    """Timed runs; one of a million tokens takes a minute, and differs little from the next."""
    target: str = ""
    roofline: float = 0.0
    """Tokens per second that the memory's bandwidth allows, as the research notes work it out."""


SHAPES = (
    Shape("Qwen3-0.6B bf16", "qwen3-0.6b", runs=5, target=">= 28000", roofline=40_600),
    Shape(
        "Llama-3.1-8B bf16", "llama3.1-8b", max_num_batched_tokens=2048,
        target=">= 10900", roofline=14_800,
    ),
    Shape(
        "Qwen3-14B bf16", "qwen3-14b", max_num_batched_tokens=2048,
        target=">= 6300", roofline=9_000,
    ),
    Shape(
        "Llama-3.1-8B fp8 1000/1000", "llama3.1-8b", quantization="fp8", kv_cache_dtype="fp8",
        requests=1024, fixed=1000, at_a_time=512, runs=1, target=">= 13500",
    ),
    Shape(
        "Llama-3.1-8B bf16, captured prompts", "llama3.1-8b", max_num_batched_tokens=288,
        max_cudagraph_capture_size=288, target=">= 10900", roofline=14_800,
    ),
    Shape(
        "Qwen3-14B bf16, captured prompts", "qwen3-14b", max_num_batched_tokens=288,
        max_cudagraph_capture_size=288, target=">= 6300", roofline=9_000,
    ),
)  # fmt: skip


def workload(shape: Shape) -> tuple[list[list[int]], list[int]]:
    """Return prompts and the lengths of their answers."""
    rng = random.Random(0)
    if shape.fixed is not None:
        draw = [[rng.randint(0, 10_000) for _ in range(shape.fixed)] for _ in range(shape.requests)]
        return draw, [shape.fixed] * shape.requests
    prompts = [
        [rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))]
        for _ in range(shape.requests)
    ]
    return prompts, [rng.randint(100, 1024) for _ in range(shape.requests)]


def run_shape(shape: Shape, runs: int) -> dict[str, Any]:
    """Start an engine for a shape and time its answers."""
    from meshwright.run.serve.engine.engine_config import EngineConfig
    from meshwright.run.serve.llm import LLM
    from meshwright.run.serve.sampling_params import SamplingParams
    from meshwright.spec import catalog
    from meshwright.spec.scheduler_config import SchedulerConfig

    prompts, outputs = workload(shape)
    longest = max(len(prompt) + out for prompt, out in zip(prompts, outputs, strict=True)) + 1
    limits = SchedulerConfig(
        max_num_seqs=shape.at_a_time,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        max_cudagraph_capture_size=shape.max_cudagraph_capture_size,
        # Nobody waits for a first token here: pages may be large.
        block_size=128 if shape.kv_cache_dtype == "fp8" else 64,
        kv_cache_dtype=shape.kv_cache_dtype,
        # What earlier runs left in the cache must not be found again.
        enable_prefix_caching=False,
    )
    settings = EngineConfig(
        scheduler_config=limits,
        max_model_len=longest,
        quantization=shape.quantization,
        random_weights=True,
    )
    start = time.perf_counter()
    llm = LLM(catalog.get_model(shape.model), settings)
    started_s = time.perf_counter() - start
    sampling = [
        SamplingParams(temperature=0.6, max_tokens=out, ignore_eos=True, seed=1) for out in outputs
    ]
    llm.generate([prompts[0]], sampling[0])
    rates, steps = [], 0
    for _ in range(runs):
        before = llm.engine.stats()
        start = time.perf_counter()
        found = llm.generate(prompts, sampling)
        took = time.perf_counter() - start
        written = sum(len(each.outputs[0].token_ids) for each in found)
        assert written == sum(outputs), "every answer has as many tokens as asked for"
        rates.append(written / took)
        steps = llm.engine.stats().steps - before.steps
    return {
        "rates": rates,
        "steps": steps,
        "start_s": started_s,
        "start": dict(llm.startup_s),
        "preemptions": llm.engine.stats().preemptions,
        "streamed": _streamed(llm),
    }


def _streamed(llm: Any) -> str:
    """Say which products are streamed, and up to how many rows."""
    streaming = getattr(llm.engine.runner, "persistent_gemm", None)
    chosen = {} if streaming is None else streaming.selected_rows
    return ", ".join(f"{kind} to {max(points)}" for kind, points in chosen.items() if points)


def measure(quick: bool) -> dict[str, object]:
    """Time every shape, each in a process of its own."""
    import torch

    if not torch.cuda.is_available():
        raise MissingDependency(
            "models of real sizes are served on a GPU", "run it where there is one"
        )
    wanted = os.environ.get("SERVE_SHAPES", "")
    figures, peers, notes = [], [], []
    for number, shape in enumerate(SHAPES):
        if (wanted and str(number) not in wanted.split(",")) or (quick and number):
            continue
        runs = "1" if quick else str(shape.runs)
        command = [sys.executable, "-m", "benchmarks.serve_offline", str(number), runs]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            notes.append(f"{shape.name} failed: {done.stderr.strip().splitlines()[-1:]}")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        rate = statistics.median(found["rates"])
        figures.append(figure(f"{shape.name}", rate, "output tokens/s", shape.target))
        if shape.roofline:
            share = 100 * rate / shape.roofline
            figures.append(figure(f"{shape.name}, of the roofline", share, "%"))
        target = "< 20" if shape.name.startswith("Llama-3.1-8B bf16") else ""
        figures.append(figure(f"{shape.name}, start", found["start_s"], "s", target))
        parts = ", ".join(f"{what} {seconds:.1f}" for what, seconds in found["start"].items())
        rates = ", ".join(f"{rate:,.0f}" for rate in found["rates"])
        streamed = f"; streamed: {found['streamed']}" if found["streamed"] else ""
        notes.append(
            f"{shape.name}: {rates} tokens/s; start {parts}; {found['steps']} steps{streamed}"
        )
    for path in sorted(Path(os.environ.get("SERVE_PEERS", "-")).glob("*.json")):
        peers += json.loads(path.read_text())
    return {"figures": figures, "peers": peers, "notes": ". ".join(notes)}


def main(number: str, runs: str, step: str = "") -> None:
    """Time one shape, in steps of other captured tokens where these are given."""
    shape = SHAPES[int(number)]
    if step:
        shape = shape._replace(
            max_num_batched_tokens=int(step), max_cudagraph_capture_size=int(step)
        )
    print(json.dumps(run_shape(shape, int(runs))))


if __name__ == "__main__":
    main(*sys.argv[1:])
