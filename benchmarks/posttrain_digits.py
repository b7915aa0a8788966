"""Reinforcement learning end to end on one core: sorting digits from rewards of 0 and 1.

Our engine draws, verifiers in processes of their own judge, the trainer learns, weights go back to
the engine. Held-out lists, a tenth of all, are kept from training by a hash of the list. The
placebo is the same run with the rewards of each step dealt out anew by chance. Seed 0 is run once
more with numbers of fewer bits: in bf16 on both sides, and with the engine's matrices in fp8; on a
GPU too, where there is one.
"""

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from benchmarks.result import figure

if TYPE_CHECKING:
    from meshwright.run.posttrain.rl import RLResult

NAME = "posttrain_digits"
QUESTION = "Does the loop learn a task from a checker alone, and how long does that take on a core?"
SEEDS = (0, 1, 2)
Correction = Literal["none", "truncated"]
FORMATS: dict[str, dict[str, str]] = {"bf16": {}, "bf16, engine in fp8": {"engine_weights": "fp8"}}
"""Numbers of fewer bits than the processor's usual fp32."""
CORRECTIONS: dict[str, Correction] = {"": "none", ", truncated": "truncated"}
_FP8 = (8, 9)
"""The least compute capability whose products take fp8."""


class Way(NamedTuple):
    """A run with numbers of fewer bits."""

    name: str
    device: str
    correction: Correction
    format: dict[str, str]


def ways_of(capability: tuple[int, int] | None) -> tuple[list[Way], str]:
    """Return the runs that a machine can do, by its GPU, and what it leaves out."""
    made = [
        Way(f"{name}{ending}", "cpu", correction, chosen)
        for name, chosen in FORMATS.items()
        for ending, correction in CORRECTIONS.items()
    ]
    if capability is None:
        return made, "Runs on a GPU are left out: torch sees none."
    on_gpu = [way._replace(name=f"on a GPU, {way.name}", device="cuda") for way in made]
    if capability < _FP8:
        kept = [way for way in on_gpu if not way.format]
        return [*made, *kept], "fp8 on the GPU is left out: its products need capability 8.9."
    return [*made, *on_gpu], ""


def measure(quick: bool) -> dict[str, object]:
    """Train three seeds, a placebo, and seed 0 with numbers of fewer bits."""
    import torch

    from meshwright.run.posttrain.rl import get_sorting_digits_preset, run_rl
    from meshwright.run.posttrain.rl.config.rl_config import ObjectiveConfig, RLEvaluationConfig

    steps = 3 if quick else get_sorting_digits_preset().steps
    held_out = RLEvaluationConfig(num_prompts=50 if quick else 2000)
    usual: dict[str, Any] = {"steps": steps, "evaluate": held_out, "device": "cpu"}
    figures = []
    for seed in SEEDS[:1] if quick else SEEDS:
        outcome = run_rl(get_sorting_digits_preset(seed, **usual))
        drawn = sum(row["answers"] * row["length_mean"] for row in outcome.step_metrics)
        generate_s = sum(row["generate_s"] for row in outcome.step_metrics)
        figures += [
            *_learned(f"seed {seed}", outcome, most_gap="<= 1e-5", most_s="< 120"),
            figure(f"seed {seed}, drawn", drawn / generate_s, "tokens/s"),
        ]
    placebo = run_rl(get_sorting_digits_preset(0, **usual, shuffle_rewards=True))
    after = placebo.held_out_metrics[steps]
    figures += [
        figure("placebo, sampled after", 100 * after["eval_reward"], "%", "< 10"),
        figure("placebo, greedy after", 100 * after["eval_greedy_reward"], "%"),
    ]
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    ways, left_out = ways_of(capability)
    for way in ways:
        aim = ObjectiveConfig(minibatches=4, importance_correction=way.correction)
        given = {**usual, "device": way.device, "precision": "bf16", "objective": aim, **way.format}
        outcome = run_rl(get_sorting_digits_preset(0, **given))
        mean = sum(row["logprob_gap_mean"] for row in outcome.step_metrics) / len(
            outcome.step_metrics
        )
        figures += [
            *_learned(f"seed 0, {way.name}", outcome),
            figure(f"seed 0, {way.name}, engine against trainer, mean |Δ log p|", mean, "nats"),
        ]
    notes = (
        f"Two layers of 64, {steps} steps of 64 prompts with 8 answers each, after 30 supervised "
        f"steps of 64 answers; {held_out.num_prompts:,} held-out lists. torch with one thread; "
        "processor time is that of all processes and of the whole run, evaluations included; "
        "|Δ log p| is over the first quarter of each step's answers, before they are trained on. "
        f"In fp8 a processor rounds as a GPU does, and multiplies in more bits. {left_out}"
    )
    return {"figures": figures, "notes": notes.strip()}


def _learned(
    name: str, outcome: "RLResult", *, most_gap: str = "", most_s: str = ""
) -> list[dict[str, object]]:
    """Return what a run came to on held-out lists, and how far both sides were apart."""
    before, after = outcome.held_out_metrics[0], outcome.held_out_metrics[outcome.trained_steps]
    gap = max(row["logprob_gap_max"] for row in outcome.step_metrics)
    return [
        figure(f"{name}, sampled before", 100 * before["eval_reward"], "%", "< 10"),
        figure(f"{name}, sampled after", 100 * after["eval_reward"], "%", "> 90"),
        figure(f"{name}, greedy before", 100 * before["eval_greedy_reward"], "%"),
        figure(f"{name}, greedy after", 100 * after["eval_greedy_reward"], "%"),
        figure(f"{name}, processor time", outcome.cpu_s, "s", most_s),
        figure(f"{name}, engine against trainer, most |Δ log p|", gap, "nats", most_gap),
    ]
