"""How fast layouts are searched: every one tried in turn, the best proved, and Calculon beside it.

Calculon is another program with another licence, so it is not shipped: name a checkout of
github.com/calculon-ai/calculon and, if this interpreter lacks what it needs (pandas, psutil),
another interpreter. Without it the comparison is left out.

    python -m benchmarks.plan_search --calculon DIR [--calculon-python PYTHON] [--quick]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks.run import Benchmark, run_all
from meshwright.predict.plan import LayoutSpace, PlanQuestion, find_plans
from meshwright.predict.validation.plans.exhaustive_search import search_exhaustively
from meshwright.predict.validation.plans.space_size import count_layouts
from meshwright.spec import Layout, TrainingWorkload, catalog
from meshwright.spec.model import build_gpt

NAME = "plan_search"
QUESTION = "How fast does one core go through layouts, and prove which is best?"

REPEATS = 3
CALCULON_CPU_S = 60.0
FOLDER, PYTHON = "CALCULON", "CALCULON_PYTHON"
"""Variables that name a checkout of Calculon and the interpreter to run it."""

TRIED = "Megatron-1T, every layout"
USUAL = "Megatron-1T, every layout in one order of the axes"
PROVED = "Megatron-1T"
WHOLE = {
    "GPT-3 175B, 4,096 A100": ("gpt3-175b", "dgx-a100-80g", 4096, 4096, 2048, ""),
    "Llama 3.1 405B, 16,384 H100": ("llama3.1-405b", "h100-superpod", 16384, 2048, 8192, "< 60"),
    "Llama 3.1 70B, 1,024 H100": ("llama3.1-70b", "h100-superpod", 1024, 1024, 8192, "< 10"),
    "DeepSeek-V3, 2,048 H100": ("deepseek-v3", "h100-superpod", 2048, 15360, 4096, "< 60"),
}
"""Model, cluster, GPUs, sequences in a batch and their length, seconds promised for the proof."""


def whole(name: str) -> PlanQuestion:
    """Return the question that leaves every field open."""
    model, cluster, gpus, batch, length, _ = WHOLE[name]
    return PlanQuestion(
        model=catalog.get_model(model),
        cluster=catalog.get_cluster(cluster).with_gpus(gpus),
        workload=TrainingWorkload(tokens=10**12, sequence_length=length, global_batch=batch),
    )


def calculon_problem(**more: tuple[Any, ...]) -> PlanQuestion:
    """Return Calculon's problem with the choices that Calculon has, some of them narrowed.

    Its kinds of tensor communication are sequence parallelism here, the network it picks for every
    axis is the order of the axes, and its interleavings divide the layers evenly.
    """
    fixed = {
        "cp": (1,),
        "schedule": ("1f1b", "interleaved"),
        "virtual_stages": (1, 2, 4, 8, 16, 32, 64),
        "stage_layers": (None,),
        "recompute_ops": (("core_attn",),),
        "recompute_layers": (None,),
        "zero": (0, 1),
        "shard": (None,),
        "offload": ((),),
    }
    model = build_gpt(
        "megatron-1t", layers=128, hidden=25600, heads=160, vocab=51200, max_positions=2048
    )
    return PlanQuestion(
        model=model,
        cluster=catalog.get_cluster("dgx-a100-80g").with_gpus(4096),
        workload=TrainingWorkload(tokens=10**12, sequence_length=2048, global_batch=4096),
        space=LayoutSpace(base=Layout(precision="fp16"), fixed={**fixed, **more}),
    )


def freed() -> PlanQuestion:
    """Return Calculon's problem with recompute on any number of layers, as the search sees it."""
    question = calculon_problem()
    fixed = {k: v for k, v in question.space.fixed.items() if k != "recompute_layers"}
    return replace(question, space=replace(question.space, fixed=fixed))


def case(name: str) -> dict[str, float]:
    """Do one job in this process and say what it took."""
    if name in (TRIED, USUAL):
        more = {"order": ("tp-cp-ep-dp-pp",)} if name == USUAL else {}
        question = calculon_problem(**more)
        start, cpu = time.perf_counter(), time.process_time()
        tally = search_exhaustively(question)
        took = {"wall_s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}
        if tally.best is None or tally.tried != count_layouts(question):
            raise RuntimeError(f"{tally.tried} tried of {count_layouts(question)} layouts")
        more_ = {"tried": tally.tried, "fit": tally.feasible, "pipelines": tally.pipelines}
        return took | more_ | {"best_s": tally.best.step_s}
    question = freed() if name == PROVED else whole(name)
    start, cpu = time.perf_counter(), time.process_time()
    answer = find_plans(question, most=1, execute=False)
    took = {"wall_s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}
    if not answer.is_proved:
        raise RuntimeError(f"{name}: the search ended without a proof")
    return took | {
        "judged": answer.layouts_bounded,
        "evaluated": answer.evaluated,
        "size": count_layouts(question),
        "best_s": answer.best.step.step_s,
    }


def repeated(name: str, times: int) -> dict[str, float]:
    """Do a job in some fresh processes; return the medians, and the last of what must agree."""
    command = [sys.executable, "-m", "benchmarks.plan_search", "--case", name]
    every = []
    for _ in range(times):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name} failed: {done.stderr[-2000:]}")
        every.append(json.loads(done.stdout))
    last: dict[str, float] = every[-1]
    return last | {key: statistics.median(one[key] for one in every) for key in ("wall_s", "cpu_s")}


def calculon(budget_s: float) -> dict[str, float] | str:
    """Time Calculon's search, or say why that cannot be."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return f"Calculon was not measured: set {FOLDER}, or give --calculon, to a checkout of it."
    script = Path(__file__).with_name("calculon_rate.py")
    python = os.environ.get(PYTHON) or sys.executable
    command = [python, str(script), folder, str(budget_s)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return f"Calculon was not measured: it failed with {last}"
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(quick: bool) -> dict[str, object]:
    """Try everything, prove the best, and let Calculon do what it can on the same problem."""
    times = 1 if quick else REPEATS
    other = calculon(5.0 if quick else CALCULON_CPU_S)
    usual = repeated(USUAL, times)
    every = usual if quick else repeated(TRIED, times)
    proved = repeated(PROVED, times)
    if proved["best_s"] > every["best_s"] * (1 + 1e-9):
        raise RuntimeError("trying everything found a faster layout than the proved one")
    figures = [*_tried(TRIED, every, other), *_tried(USUAL, usual, other)]
    figures += _proved(PROVED, proved, "")
    for name in list(WHOLE)[2:] if quick else WHOLE:
        figures += _proved(name, repeated(name, times), WHOLE[name][-1])
    return {"figures": figures, "peers": _peers(other), "notes": _notes(every, proved, other)}


def _tried(name: str, found: dict[str, float], other: dict[str, float] | str) -> list[Any]:
    rate = found["tried"] / found["cpu_s"]
    figures = [
        _figure(f"{name}: tried per CPU second", rate, "/s"),
        _figure(
            f"{name}: fitting, so predicted, per CPU second", found["fit"] / found["cpu_s"], "/s"
        ),
        _figure(f"{name}: tried", found["tried"], "layouts"),
        _figure(f"{name}: fitting", found["fit"], "layouts"),
        _figure(f"{name}: CPU time", found["cpu_s"], "s"),
    ]
    if isinstance(other, dict):
        ratio = rate * other["cpu_s"] / other["tried"]
        figures.insert(1, _figure(f"{name}: rate over Calculon's", ratio, "×", ">= 30"))
        if other["fit"]:
            ratio = found["fit"] / found["cpu_s"] * other["cpu_s"] / other["fit"]
            figures.insert(3, _figure(f"{name}: fitting, rate over Calculon's", ratio, "×"))
    return figures


def _proved(name: str, found: dict[str, float], promised: str) -> list[Any]:
    return [
        _figure(f"{name}, proved: CPU time", found["cpu_s"], "s", promised),
        _figure(f"{name}, proved: wall time", found["wall_s"], "s"),
        _figure(f"{name}, proved: layouts in the space", found["size"], "layouts"),
        _figure(f"{name}, proved: judged one by one", found["judged"], "layouts"),
        _figure(f"{name}, proved: predicted in full", found["evaluated"], "layouts"),
        _figure(f"{name}, proved: pruned unseen", found["size"] - found["judged"], "layouts"),
    ]


def _peers(other: dict[str, float] | str) -> list[Any]:
    if isinstance(other, str):
        return []
    tried, fit, cpu = other["tried"], other["fit"], other["cpu_s"]
    return [
        _figure("Calculon, Megatron-1T: tried per CPU second", tried / cpu, "/s"),
        _figure("Calculon, Megatron-1T: fitting per CPU second", fit / cpu, "/s"),
        _figure("Calculon, Megatron-1T: tried in its budget", tried, "configurations"),
        _figure("Calculon, Megatron-1T: its space", other["configurations"], "configurations"),
        _figure("Calculon, Megatron-1T: CPU time", cpu, "s"),
    ]


def _notes(every: dict[str, float], proved: dict[str, float], other: dict[str, float] | str) -> str:
    notes = (
        "One process on one core; CPU time, because the machine had other work; every run in a"
        " fresh process (the peak of memory below is not theirs), medians of several."
        " Megatron-1T: 4,096 A100-80G, 4,096 sequences of 2,048 tokens, fp16, no offload;"
        " tensor, pipeline and data parallel degrees, microbatch,"
        " interleaving, recompute (none, attention, full), sequence parallelism, sharded optimizer,"
        " switches of overlap, and the order of the axes (Calculon picks a network for every axis"
        " instead). A layout is tried when its memory is decided; a step is predicted where it"
        f" fits. Layouts share work: {every['pipelines']:,.0f} pipelines were worked out for"
        f" {every['fit']:,.0f} layouts that fit, the same to 1e-9 as one by one. The fastest of all"
        f" takes {every['best_s']:.2f} s; the proved search, which may also recompute some layers"
        f" only, finds {proved['best_s']:.2f} s. Pruned unseen are layouts that no bound was worked"
        " out for one by one. The other questions leave every field open but precision,"
        " optimizer, formats of states and what goes to the host."
    )
    if isinstance(other, str):
        return f"{notes} {other}"
    return notes + (
        f" Calculon searched a random {other['groups']:,.0f} of its {other['all_groups']:,.0f}"
        " groups as `llm-optimal-execution -m -t 5` does, called from Python in one process, which"
        " spares it the cost of its pool; -m leaves out larger microbatches once one does not fit,"
        " and those are not counted."
    )


def _figure(name: str, value: float, unit: str, target: str = "") -> dict[str, object]:
    figure: dict[str, object] = {"name": name, "value": value, "unit": unit}
    return figure | {"target": target} if target else figure


def main() -> int:
    """Run this benchmark with Calculon beside it."""
    parser = argparse.ArgumentParser(prog="benchmarks.plan_search", description=QUESTION)
    parser.add_argument("--calculon", metavar="DIR", help="a checkout of calculon-ai/calculon")
    parser.add_argument("--calculon-python", metavar="PYTHON", help="its interpreter (this one)")
    parser.add_argument("--quick", action="store_true", help="a small run, not kept")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(case(arguments.case)))
        return 0
    for name, value in ((FOLDER, arguments.calculon), (PYTHON, arguments.calculon_python)):
        if value:
            os.environ[name] = value
    bad = run_all([Benchmark(NAME, QUESTION, f"benchmarks.{NAME}")], quick=arguments.quick)
    print("\n".join(bad), file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
