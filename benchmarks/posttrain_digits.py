"""Reinforcement learning end to end on one core: sorting digits from rewards of 0 and 1.

Our engine draws, verifiers in processes of their own judge, the trainer learns, weights go back to
the engine. Held-out lists, a tenth of all, are kept from training by a hash of the list. The
placebo is the same run with the rewards of each step dealt out anew by chance.
"""

from benchmarks.result import figure

NAME = "posttrain_digits"
QUESTION = "Does the loop learn a task from a checker alone, and how long does that take on a core?"
SEEDS = (0, 1, 2)


def measure(quick: bool) -> dict[str, object]:
    """Train three seeds and a placebo."""
    from meshwright.run.posttrain.loop import run, sorting_digits
    from meshwright.run.posttrain.loop.settings import EvaluateSettings

    steps = 3 if quick else sorting_digits().steps
    held_out = EvaluateSettings(prompts=50 if quick else 2000)
    figures = []
    for seed in SEEDS[:1] if quick else SEEDS:
        outcome = run(sorting_digits(seed, steps=steps, evaluate=held_out))
        before, after = outcome.held_out[0], outcome.held_out[steps]
        gap = max(row["logp_gap_max"] for row in outcome.rows)
        drawn = sum(row["answers"] * row["length_mean"] for row in outcome.rows)
        generate_s = sum(row["generate_s"] for row in outcome.rows)
        figures += [
            figure(f"seed {seed}, sampled before", 100 * before["held_out_reward"], "%", "< 10"),
            figure(f"seed {seed}, sampled after", 100 * after["held_out_reward"], "%", "> 90"),
            figure(f"seed {seed}, greedy before", 100 * before["held_out_greedy_reward"], "%"),
            figure(f"seed {seed}, greedy after", 100 * after["held_out_greedy_reward"], "%"),
            figure(f"seed {seed}, processor time", outcome.cpu_s, "s", "< 120"),
            figure(f"seed {seed}, engine against trainer, most |Δ log p|", gap, "nats", "<= 1e-5"),
            figure(f"seed {seed}, drawn", drawn / generate_s, "tokens/s"),
        ]
    placebo = run(sorting_digits(0, steps=steps, evaluate=held_out, shuffle_rewards=True))
    after = placebo.held_out[steps]
    figures += [
        figure("placebo, sampled after", 100 * after["held_out_reward"], "%", "< 10"),
        figure("placebo, greedy after", 100 * after["held_out_greedy_reward"], "%"),
    ]
    notes = (
        f"Two layers of 64, {steps} steps of 64 prompts with 8 answers each, after 30 supervised "
        f"steps of 64 answers; {held_out.prompts:,} held-out lists. torch with one thread; "
        "processor time is that of all processes and of the whole run, evaluations included; "
        "|Δ log p| is over the first quarter of each step's answers, before they are trained on."
    )
    return {"figures": figures, "notes": notes}
