"""Rollouts and training at the same time on one GPU, against one after the other.

Lists to be sorted have 4 to 256 digits: half of them are short, and a few very long. A synchronous
step waits for its longest answer while the GPU decodes a handful of rows; an asynchronous one goes
on with what has ended. Both train on as many prompts, from the same weights: a model is warmed up
once for each seed. Answers are at most two steps old; they are drawn by a worker, or in a thread of
the process that trains. Prompts come into most steps of an engine that never waits, so that these
are captured, in both ways: `mw simulate rl` says what staleness and captured steps are worth.

    python -m benchmarks.posttrain_async [--tiny] [--steps 24] [--seeds 0 1 2]
        [--ways "synchronous" "asynchronous"] [--staleness 2]
        [--max-cudagraph-capture-size 4096] [--out FILE]
"""

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.result import figure
from meshwright.errors import MissingDependency

NAME = "posttrain_async"
QUESTION = "How much faster is asynchronous than synchronous reinforcement learning on one GPU?"
SYNCHRONOUS = "synchronous"
ONE_PROCESS = "asynchronous in one process"
TWO_PROCESSES = "asynchronous"
WAYS = (SYNCHRONOUS, TWO_PROCESSES, ONE_PROCESS)
"""Threads of one process take turns at its interpreter, which costs all that overlapping gains."""
STALENESS = 2
MAX_CUDAGRAPH_CAPTURE_SIZE = 4096


def settings(
    *, tiny: bool, seed: int, steps: int, model: str, warms: bool = False, **given: Any
) -> Any:
    """Return a run from a model, or its warm-up; a tiny one does for a processor."""
    from meshwright.run.posttrain.rl.config.rl_config import (
        ObjectiveConfig,
        RLConfig,
        RLEvaluationConfig,
        TaskConfig,
        WarmupConfig,
    )
    from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig

    longest = 24 if tiny else 256
    warm_up = (4 if tiny else 300) if warms else 0
    return RLConfig(
        seed=seed,
        steps=steps,
        prompts_per_step=4 if tiny else 32,
        group_size=4 if tiny else 8,
        task=TaskConfig(digits=4, longest=longest, reward="share"),
        model=model,
        warm_up=WarmupConfig(steps=warm_up, answers=16 if tiny else 64, lr=3e-4),
        objective=ObjectiveConfig(minibatches=2),
        optimizer=OptimizerConfig(lr=5e-5, schedule="linear", warmup_steps=0, weight_decay=0.01),
        evaluate=RLEvaluationConfig(num_prompts=20 if tiny else 1000),
        microbatch_tokens=2048 if tiny else 32768,
        threads=1 if tiny else None,
        **given,
    )


def warmed_up(folder: Path, *, tiny: bool, seed: int) -> str:
    """Write the model that all runs of a seed begin with; return where."""
    from meshwright.run.nn.decoder_builder import build_decoder
    from meshwright.run.nn.huggingface import save_hf_checkpoint
    from meshwright.run.nn.weight_init import materialize
    from meshwright.run.posttrain.rl import run_rl
    from meshwright.run.posttrain.rollout.sorting_task.sorting_digits import DigitTokenizer
    from meshwright.spec.model import AttentionSpec, BlockSpec, MLPSpec, Model, Rotary

    layers, wide, heads, ffn = (2, 32, 2, 64) if tiny else (12, 768, 12, 2048)
    mixer = AttentionSpec(heads=heads, kv_heads=heads, head_dim=wide // heads, rotary=Rotary())
    decoder = build_decoder(
        Model(
            name="sorter", family="llama", hidden=wide, vocab=DigitTokenizer.vocab,
            pattern=f"{layers}*plain",
            blocks=(BlockSpec(name="plain", mixer=mixer, mlp=MLPSpec(width=ffn)),),
            max_positions=1024,
        )
    )  # fmt: skip
    materialize(decoder, "cpu", seed=seed)
    drawn, ready = folder / "drawn", folder / "ready"
    save_hf_checkpoint(decoder, drawn)
    plan = settings(tiny=tiny, seed=seed, steps=1, model=str(drawn), warms=True, rollout_only=True)
    save_hf_checkpoint(run_rl(plan).decoder, ready)
    # Compiles what all runs use.
    run_rl(settings(tiny=tiny, seed=seed, steps=2, model=str(ready)))
    return str(ready)


def one(*, tiny: bool, seed: int, steps: int, model: str, **given: Any) -> dict[str, Any]:
    """Train once; return the pace of its steps and what it came to."""
    from meshwright.run.posttrain.rl import run_rl

    outcome = run_rl(settings(tiny=tiny, seed=seed, steps=steps, model=model, **given))
    # All steps: an asynchronous run fills its pipe in the first ones and drains it in the last.
    rows = outcome.step_metrics
    seconds = sum(row["step_s"] for row in rows)
    drawn = sum(row["answers"] * row["length_mean"] for row in rows)
    return {
        "step_s": seconds / len(rows),
        "tokens_per_s": drawn / seconds,
        "train_s": statistics.mean(row["train_s"] for row in rows),
        "length_mean": statistics.mean(row["length_mean"] for row in rows),
        "length_max": max(row["length_max"] for row in rows),
        "staleness_mean": statistics.mean(row["staleness_mean"] for row in rows),
        "gap_max": max(row.get("logprob_gap_max", 0.0) for row in outcome.step_metrics),
        "before": outcome.held_out_metrics[0]["eval_reward"],
        "after": outcome.held_out_metrics[steps]["eval_reward"],
        "seconds": outcome.duration_by_activity_s,
        "wall_s": outcome.wall_s,
    }


def compare(
    *,
    tiny: bool,
    steps: int,
    seeds: Iterable[int],
    ways: Iterable[str] = WAYS,
    staleness: int = STALENESS,
    max_cudagraph_capture_size: int = MAX_CUDAGRAPH_CAPTURE_SIZE,
) -> Iterator[dict[str, Any]]:
    """Train in each way, all seeds; each is told as it ends."""
    from meshwright.run.posttrain.workers.worker_config import WorkerConfig

    drawn: dict[str, dict[str, Any]] = {
        SYNCHRONOUS: {"placement": "disaggregated"},
        ONE_PROCESS: {"placement": "async", "max_staleness": staleness},
    }
    drawn[TWO_PROCESSES] = drawn[ONE_PROCESS] | {"workers": WorkerConfig(num_workers=1)}
    for seed in seeds:
        with TemporaryDirectory() as place:
            model = warmed_up(Path(place), tiny=tiny, seed=seed)
            for way in ways:
                given = drawn[way] | {"max_cudagraph_capture_size": max_cudagraph_capture_size}
                found = one(tiny=tiny, seed=seed, steps=steps, model=model, **given)
                yield {"seed": seed, "way": way, **found}


def figures_of(found: list[dict[str, Any]]) -> list[dict[str, object]]:
    """Return means over seeds."""

    def of(way: str, name: str) -> list[float]:
        return [each[name] for each in found if each["way"] == way]

    base = statistics.mean(of(SYNCHRONOUS, "tokens_per_s"))
    figures = [figure("synchronous, drawn and trained", base, "tokens/s")]
    for way in dict.fromkeys(each["way"] for each in found):
        if way != SYNCHRONOUS:
            pace = statistics.mean(of(way, "tokens_per_s")) / base
            target = ">= 1.3" if way == TWO_PROCESSES else ""
            figures.append(figure(f"{way}, pace over synchronous", pace, "×", target))
        after = of(way, "after")
        figures.append(figure(f"{way}, held-out reward", statistics.mean(after), "share"))
        if len(after) > 1:
            figures.append(figure(f"{way}, spread of seeds", statistics.stdev(after), "share"))
    return figures


def measure(quick: bool) -> dict[str, object]:
    """Compare on a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise MissingDependency("both sides share a GPU here", "run it where there is one")
    seeds = range(1 if quick else 3)
    found = list(compare(tiny=False, steps=8 if quick else 24, seeds=seeds, ways=WAYS[:2]))
    lengths = (
        f"{found[0]['length_mean']:.0f} tokens on average, {found[0]['length_max']:.0f} at most"
    )
    notes = (
        "12 layers of 768 in bf16, 32 prompts with 8 answers a step, lists of 4 to 256 digits; "
        f"answers had {lengths}. All steps count, after a run of two that is not "
        "timed. Runs of a seed begin with the same weights. Asynchronous answers are at most "
        f"{STALENESS} steps old; steps of the engines with prompts are captured up to "
        f"{MAX_CUDAGRAPH_CAPTURE_SIZE} tokens, in both ways."
    )
    return {"figures": figures_of(found), "notes": notes}


def main() -> None:
    """Compare, and print or keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a run that a processor does")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=list(WAYS))
    parser.add_argument("--staleness", type=int, default=STALENESS)
    parser.add_argument(
        "--max-cudagraph-capture-size", type=int, default=MAX_CUDAGRAPH_CAPTURE_SIZE
    )
    parser.add_argument("--out", type=Path, help="a file for all that was found")
    given = parser.parse_args()
    if SYNCHRONOUS not in given.ways:
        parser.error("--ways needs synchronous, which all others are compared with")
    found = []
    told = compare(
        tiny=given.tiny, steps=given.steps, seeds=given.seeds, ways=given.ways,
        staleness=given.staleness, max_cudagraph_capture_size=given.max_cudagraph_capture_size,
    )  # fmt: skip
    for each in told:
        found.append(each)
        print(json.dumps({name: each[name] for name in each if name != "seconds"}), flush=True)
        if given.out is not None:  # whatever ends this, what was found is kept
            given.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    for row in figures_of(found):
        print(f"{row['name']}: {row['value']} {row['unit']}")


if __name__ == "__main__":
    main()
