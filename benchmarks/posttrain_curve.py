"""A harder task on a GPU, as a curve: sorting sixteen digits for rewards of 0 and 1.

The picture of docs/guide/posttrain-rl.md is drawn from the runs kept beside it.

python -m benchmarks.posttrain_curve [--tiny] [--steps 150] [--warm-up N] [--seed 0] [--placebo]
    [--out FILE]
python -m benchmarks.posttrain_curve --draw PICTURE.svg RUN.json PLACEBO.json
"""

import argparse
import json
from pathlib import Path
from typing import Any, Literal

from benchmarks.result import figure
from meshwright.errors import MissingDependency

NAME = "posttrain_curve"
QUESTION = "How does held-out accuracy grow when sixteen digits are sorted for rewards of 0 and 1?"

WARM_UP = 40
"""Supervised steps: enough that about one sampled answer in a hundred is right, and no more."""


def settings(
    *,
    tiny: bool,
    seed: int,
    steps: int,
    placebo: bool = False,
    warm_up: int = WARM_UP,
    precision: Literal["fp32", "bf16"] = "fp32",
) -> Any:
    """Return the run; a tiny one shows on a processor that all of it works."""
    from meshwright.run.posttrain.rl.config.rl_config import (
        ObjectiveConfig,
        RLConfig,
        RLEvaluationConfig,
        TaskConfig,
        TinyModelConfig,
        WarmupConfig,
    )
    from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig

    network = TinyModelConfig(layers=6, hidden=256, heads=8, ffn=768, max_positions=64)
    if tiny:
        network = TinyModelConfig(layers=1, hidden=16, heads=2, ffn=32, max_positions=64)
    return RLConfig(
        seed=seed,
        steps=steps,
        prompts_per_step=4 if tiny else 128,
        group_size=4 if tiny else 16,
        task=TaskConfig(digits=16, reward="exact"),
        network=network,
        precision=precision,
        warm_up=WarmupConfig(steps=5 if tiny else warm_up, answers=16 if tiny else 128, lr=5e-4),
        objective=ObjectiveConfig(minibatches=4),
        optimizer=OptimizerConfig(
            # At 2e-4 the first step, of signs alone, undoes what the warm-up taught.
            lr=3e-5,
            schedule="linear",
            warmup_steps=0,
            weight_decay=0.01,
            betas=(0.9, 0.95),
        ),
        evaluate=RLEvaluationConfig(
            num_prompts=20 if tiny else 2000, every_steps=max(1, steps // 20)
        ),
        microbatch_tokens=65536,
        verifier_workers=4,
        max_num_seqs=None if tiny else 1024,
        shuffle_rewards=placebo,
    )


def curve(*, say: bool = True, **given: Any) -> dict[str, Any]:
    """Train; return held-out rewards by step, and the figures of each step."""
    from meshwright.run.posttrain.rl import run_rl

    outcome = run_rl(settings(**given), say=print if say else lambda _: None)
    return {
        **given,
        "held_out": outcome.held_out_metrics,
        "rows": outcome.step_metrics,
        "seconds": outcome.duration_by_activity_s,
        "wall_s": outcome.wall_s,
    }


def measure(quick: bool) -> dict[str, object]:
    """Train on a GPU, with a placebo."""
    import torch

    if not torch.cuda.is_available():
        raise MissingDependency(
            "this task is too much for a processor", "run it where there is a GPU"
        )
    steps = 20 if quick else 150
    found = curve(say=False, tiny=False, seed=0, steps=steps, placebo=False)
    placebo = curve(say=False, tiny=False, seed=0, steps=steps, placebo=True)
    figures = []
    for trained, held_out in sorted(found["held_out"].items()):
        share = 100 * held_out["eval_reward"]
        figures.append(figure(f"sampled after {trained} steps", share, "%"))
    last = placebo["held_out"][steps]["eval_reward"]
    figures.append(figure(f"placebo after {steps} steps", 100 * last, "%"))
    figures.append(figure("wall time", found["wall_s"], "s"))
    return {"figures": figures, "notes": "6 layers of 256, 128 prompts with 16 answers a step"}


def drawn(run: dict[str, Any], placebo: dict[str, Any]) -> str:
    """Return the picture of a run and its placebo, as SVG."""
    from meshwright.cli.render.line_chart import ChartLine, LineChart, draw_line_charts

    def held_out(found: dict[str, Any]) -> list[tuple[float, float]]:
        return [(int(at), 100 * each["eval_reward"]) for at, each in found["held_out"].items()]

    rows = run["rows"]
    rewards = [(row["step"], 100 * row["reward_mean"]) for row in rows]
    silent = [(row["step"], 100 * row["groups_without_signal"] / row["groups"]) for row in rows]
    answers = (
        ChartLine("trained on", rewards),
        ChartLine("held out", held_out(run), show_points=True),
        ChartLine("held out, placebo", held_out(placebo), show_points=True),
    )
    return draw_line_charts(
        [
            LineChart("Sampled answers that are right", answers, y_unit="%", y_min=0.0),
            LineChart("Groups whose answers all have the same reward", [ChartLine("groups",
            silent)],
                  y_unit="%", y_min=0.0),
        ]
    )  # fmt: skip


def main() -> None:
    """Train once and keep the curve, or draw curves that were kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a run that a processor does")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="supervised steps before")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--placebo", action="store_true", help="deal rewards out by chance")
    parser.add_argument("--out", type=Path, help="a file for all that was found")
    parser.add_argument("--draw", type=Path, metavar="PICTURE", help="draw instead")
    parser.add_argument("kept", type=Path, nargs="*", help="a run and its placebo, to be drawn")
    given = parser.parse_args()
    if (given.draw is not None) != (len(given.kept) == 2):
        parser.error("--draw takes two files: a run and its placebo")
    if given.draw is not None:
        run, placebo = (json.loads(path.read_text(encoding="utf-8")) for path in given.kept)
        given.draw.write_text(drawn(run, placebo), encoding="utf-8")
        return
    found = curve(
        tiny=given.tiny,
        seed=given.seed,
        steps=given.steps,
        placebo=given.placebo,
        warm_up=given.warm_up,
        precision=given.precision,
    )
    for trained, held_out in sorted(found["held_out"].items()):
        print(trained, held_out)
    print(f"wall {found['wall_s']:.1f} s")
    if given.out is not None:
        given.out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
