"""Post-training on a CPU: a short supervised warm-up, then rewards alone teach a model to sort.

Beside it runs a placebo: the same with rewards dealt out by chance. What only the first learns is
the reward's doing. Commands are printed as a user would type them; what was learnt is held against
what is promised.
"""

import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

OUT = Path("demo-out")
LEARNT, PLACEBO_MOST = 0.90, 0.05
"""Share of held-out lists that sampled answers must sort after the run, and may after a placebo."""
TOLD_EVERY = 20
SETTINGS = "sorting-digits evaluate.num_prompts=500 evaluate.transcripts=6"


class Session(NamedTuple):
    """One run."""

    name: str
    folder: Path
    words: str

    @property
    def command(self) -> str:
        """What a user would type."""
        return f"mw train --recipe grpo {self.words} --output-dir {self.folder}"

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return what it has written so far, but for a line that is not whole yet."""
        path = self.folder / name
        if not path.exists():
            return []
        whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]


RUN = Session("rewards", OUT / "sorting", SETTINGS)
PLACEBO = Session("placebo", OUT / "placebo", f"{SETTINGS} shuffle_rewards=true")


def main() -> None:
    """Run both at once, tell how they get on, and what came of it."""
    OUT.mkdir(exist_ok=True)
    print(
        "A model of 111,000 random weights reads ^7391> and is to write 1379$.\n"
        "30 supervised steps show it the form of an answer; then 140 steps of GRPO: 64 lists\n"
        "a step, 8 answers to each, a reward of 1 for the sorted list and 0 for all else.\n"
        "A tenth of all lists is never trained on.\n"
    )
    began_s = time.monotonic()
    for each in (RUN, PLACEBO):
        shutil.rmtree(each.folder, ignore_errors=True)
        print(f"$ {each.command}")
    started = {each.name: _start(each) for each in (RUN, PLACEBO)}
    try:
        _follow(started)
    except BaseException:
        for process in started.values():
            process.terminate()
        raise
    found = {each.name: _answered(started[each.name], each) for each in (RUN, PLACEBO)}
    _tell(found)
    took = time.monotonic() - began_s
    print(f"\n{took:.0f} s. Curves, times and answers: {RUN.folder}/report.html")
    _check(found)


def _start(session: Session) -> "subprocess.Popen[str]":
    words = [*shlex.split(session.command), "--json"]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )


def _follow(started: dict[str, "subprocess.Popen[str]"]) -> None:
    """Print rewards of both runs every so many steps, until both have ended."""
    print("\nmean reward of a step's answers\n  step   rewards   placebo", flush=True)
    told = 0
    while True:
        running = any(process.poll() is None for process in started.values())
        rows = [each.rows("metrics.jsonl") for each in (RUN, PLACEBO)]
        reached = min(len(each) for each in rows)
        while told + TOLD_EVERY <= reached:
            told += TOLD_EVERY
            shares = "".join(f"{each[told - 1]['reward_mean']:>10.1%}" for each in rows)
            print(f"{told:>6}{shares}", flush=True)
        if not running:
            return
        time.sleep(1)


def _answered(process: "subprocess.Popen[str]", session: Session) -> dict[str, Any]:
    told, wrong = process.communicate()
    if process.returncode:
        sys.exit(f"the demo met an error: {session.command}\n{wrong or told}")
    answer: dict[str, Any] = json.loads(told)
    return answer


def _tell(found: dict[str, dict[str, Any]]) -> None:
    """Print what held-out lists say, and some answers to the same ones."""
    print("\nheld-out lists that are sorted\n            drawn by chance     the likeliest answer")
    for name, each in found.items():
        first, last = _ends(each)
        drawn, likeliest = (
            f"{first[figure]:>6.1%} → {last[figure]:<6.1%}"
            for figure in ("eval_reward", "eval_greedy_reward")
        )
        print(f"  {name:<9} {drawn:<19} {likeliest}")
    gaps = [row["logprob_gap_max"] for row in RUN.rows("metrics.jsonl")]
    print(f"\nengine and trainer differ by {max(gaps):.1e} in log p at most, over all steps")
    print("\nanswers drawn to held-out prompts ($ ends an answer, ✓ is right)")
    print("  prompt      before     after      after the placebo")
    answers = [each.rows("transcripts.jsonl") for each in (RUN, PLACEBO)]
    after = [{row["prompt"]: row for row in each if row["step"]} for each in answers]
    for row in (each for each in answers[0] if each["step"] == 0):
        told = (row, *(each[row["prompt"]] for each in after))
        shown = "".join(
            f"{each['sampled_completion'] + (' ✓' if each['sampled_reward'] == 1 else ''):<11}"
            for each in told
        )
        print(f"  {row['prompt']:<11} {shown}".rstrip())


def _ends(answer: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    by_step = {int(step): figures for step, figures in answer["held_out"].items()}
    return by_step[min(by_step)], by_step[max(by_step)]


def _check(found: dict[str, dict[str, Any]]) -> None:
    """Hold what was learnt against what this demo promises."""
    learnt, placebo = (_ends(found[each.name])[1]["eval_reward"] for each in (RUN, PLACEBO))
    if learnt < LEARNT or placebo > PLACEBO_MOST:
        sys.exit(
            f"the demo met an error: {learnt:.1%} learnt and {placebo:.1%} by the placebo; "
            f"at least {LEARNT:.0%} and at most {PLACEBO_MOST:.0%} were promised"
        )


if __name__ == "__main__":
    main()
