"""How near single steps of the engine are to what the memory and the tensor cores allow.

A decoding step reads all weights and all keys and values once: that many bytes over the bandwidth
of a copy measured in the same process is its floor. What the host adds is the part of a step's time
in which the GPU does nothing, from events around the device's work. Prompts are held against the
bf16 peak. `STEPS_MODELS` in the environment names other models of the catalog.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.result import figure
from meshwright.errors import MissingDependency

NAME = "serve_steps"
QUESTION = "How near are single steps of the engine to the roofline?"
BATCHES = (1, 32, 256, 512)
CONTEXT = 1024
STEPS = 48
PROMISED = "llama3.1-8b"
"""The model that targets are for: the ten kernels of a layer of 0.6B take as long to begin as to
read its weights, so that few rows are far from the memory's floor."""
PEAK = 989.4e12
"""Dense bf16 FLOP/s of an H100 or H200 SXM, from NVIDIA's data sheet."""


def _events() -> tuple[Any, Any]:
    import torch

    timed: Any = torch.cuda.Event
    return timed(enable_timing=True), timed(enable_timing=True)


def copy_bytes_per_s() -> float:
    """Return the bandwidth of a large copy, both ways counted."""
    import torch

    source = torch.ones(1 << 29, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    rates: list[float] = []
    for _ in range(8):
        begin, end = _events()
        begin.record()
        torch.add(source, 0, out=target)
        end.record()
        torch.cuda.synchronize()
        rates.append(8 * source.numel() / begin.elapsed_time(end) * 1e3)
    return statistics.median(rates)


def run_model(name: str, batches: tuple[int, ...] = BATCHES) -> Any:
    """Time decoding and prompts of one model."""
    import torch

    from meshwright.run.serve.engine.engine_config import EngineConfig
    from meshwright.run.serve.llm import LLM
    from meshwright.run.serve.request import Request
    from meshwright.run.serve.sampling_params import SamplingParams
    from meshwright.spec import catalog
    from meshwright.spec.model import count_flops
    from meshwright.spec.scheduler_config import SchedulerConfig

    bandwidth = copy_bytes_per_s()
    torch.cuda.empty_cache()
    model = catalog.get_model(name)
    limits = SchedulerConfig(max_num_seqs=max(batches), enable_prefix_caching=False)
    llm = LLM(model, EngineConfig(scheduler_config=limits, max_model_len=8300, random_weights=True))
    engine, rows = llm.engine, []
    weights = sum(p.numel() * p.element_size() for p in engine.runner.model.decoder.parameters())
    key_bytes = engine.runner.kv_cache.block_bytes / engine.scheduler_config.block_size
    for batch in batches:
        # Twice as many rows of half the length fill the same memory.
        context = CONTEXT if batch <= 256 else CONTEXT // 2
        sampling = SamplingParams(temperature=0.6, max_tokens=STEPS + 12, ignore_eos=True, seed=1)
        for _ in range(batch):
            engine.add_request(
                Request(prompt_token_ids=(7,) * context, sampling_params=sampling), lambda _: None
            )
        while engine.scheduler.waiting_queue or len(engine.scheduler.decode_set) < batch:
            engine.step()
        for _ in range(6):
            engine.step()
        torch.cuda.synchronize()
        keys = engine.scheduler.decode_set.attended_tokens
        walls, devices, hosts = [], [], []
        for _ in range(STEPS):
            begin, end = _events()
            start = time.perf_counter()
            begin.record()
            engine.step()
            end.record()
            walls.append((time.perf_counter() - start, begin, end))
        torch.cuda.synchronize()
        for place in range(1, STEPS):
            # From the beginning of one step on the device to the beginning of the next.
            devices.append(walls[place - 1][1].elapsed_time(walls[place][1]) / 1e3)
            hosts.append(walls[place][1].elapsed_time(walls[place][2]) / 1e3)
        step = statistics.median(devices)
        floor = (weights + (keys + STEPS / 2 * batch) * key_bytes) / bandwidth
        rows.append({
            "batch": batch, "context": context, "step_s": step, "busy_s": statistics.median(hosts),
            "floor_s": floor, "over_floor": step / floor,
        })  # fmt: skip
        while not engine.is_idle:
            engine.step()
        engine.take_outputs()
    return {"bandwidth": bandwidth, "rows": rows, "prefill": _prefill(engine, count_flops, model)}


def _prefill(engine: Any, count_flops: Any, model: Any, length: int = 8192) -> dict[str, float]:
    """Time prompts of one length, one at a time."""
    import torch

    from meshwright.run.serve.request import Request
    from meshwright.run.serve.sampling_params import SamplingParams

    times = []
    for _ in range(5):
        ask = Request(
            prompt_token_ids=(7,) * length, sampling_params=SamplingParams(max_tokens=1, seed=1)
        )
        engine.add_request(ask, lambda _: None)
        torch.cuda.synchronize()
        start = time.perf_counter()
        while not engine.is_idle:
            engine.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        engine.take_outputs()
    took = statistics.median(times)
    # The head sees the last token alone.
    flops = (count_flops(model, length).forward - 2 * model.vocab * model.hidden) * length
    return {"seconds": took, "mfu": 100 * flops / took / PEAK}


def measure(quick: bool) -> dict[str, object]:
    """Measure the models, each in a process of its own."""
    import torch

    if not torch.cuda.is_available():
        raise MissingDependency(
            "models of real sizes are served on a GPU", "run it where there is one"
        )
    figures, notes = [], []
    usual = "qwen3-0.6b" if quick else f"{PROMISED},qwen3-0.6b"
    for name in os.environ.get("STEPS_MODELS", usual).split(","):
        command = [sys.executable, "-m", "benchmarks.serve_steps", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            notes.append(f"{name} failed: {done.stderr.strip().splitlines()[-1:]}")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        for row in found["rows"]:
            what = f"{name}, {row['batch']} × {row['context']}"
            target = "<= 1.25" if name == PROMISED and row["batch"] <= 256 else ""
            figures.append(figure(f"{what}: step over its floor", row["over_floor"], "×", target))
            figures.append(figure(f"{what}: step", 1e3 * row["step_s"], "ms"))
            idle = 100 * max(0.0, 1 - row["busy_s"] / row["step_s"])
            target = "< 5" if row["batch"] == 512 else ""
            figures.append(figure(f"{what}: GPU idle", idle, "%", target))
        target = ">= 55" if name == PROMISED else ""
        figures.append(
            figure(f"{name}, prompt of 8,192: MFU", found["prefill"]["mfu"], "%", target)
        )
        notes.append(f"{name}: copy {found['bandwidth'] / 1e12:.2f} TB/s")
    return {"figures": figures, "notes": ". ".join(notes)}


if __name__ == "__main__":
    print(json.dumps(run_model(sys.argv[1])))
