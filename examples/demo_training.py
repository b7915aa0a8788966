"""A language model from scratch on a CPU: text to tokens, a training, its weights, what it learnt.

Each command is printed before it runs. The loss on held-out text is held against what is promised.
"""

import json
import math
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

OUT = Path("demo-out")
RUN = OUT / "run"
TOKENS = OUT / "tokens"
EXPORTED = OUT / "exported"

HELD_OUT_LOSS = 3.55
"""The loss on held-out text that the training must reach, in nats per token."""


class Step(NamedTuple):
    """One command to show."""

    title: str
    command: str


TRAINING = (
    Step(
        "A tokenizer, learnt from Python's own documentation and sources",
        f"mw data train-tokenizer builtin:2MB --vocab-size 2048 --out {OUT}/tokenizer.json",
    ),
    Step(
        "The same text, and made-up sums, as tokens",
        f"mw data tokenize builtin --tokenizer {OUT}/tokenizer.json --out {TOKENS}",
    ),
    Step(
        "A language model from scratch, in about two minutes on two cores",
        f"mw train examples/train-demo.toml --output-dir {RUN}",
    ),
)

READING = (
    Step("Its weights, for every tool that reads Hugging Face's", f"mw convert {RUN} {EXPORTED}"),
    Step(
        "What has it learnt? Text it goes on with (after ▸), always by the likeliest token",
        f"python examples/generate.py {EXPORTED} 'def __init__(self,' 'The \"with\" statement'",
    ),
    Step(
        "And sums, whose form it learns before their results",
        f"python examples/generate.py {EXPORTED} --line '3 + 4 =' '7 * 6 =' '90 - 40 =' '9 / 2 ='",
    ),
)


def main() -> None:
    """Run the steps, and stop at the first that fails."""
    for made in (RUN, TOKENS, EXPORTED):
        shutil.rmtree(made, ignore_errors=True)
    OUT.mkdir(exist_ok=True)
    show(TRAINING)
    check_loss()
    show(READING)


def show(steps: tuple[Step, ...]) -> None:
    """Print and run commands."""
    for step in steps:
        print(f"\n# {step.title}\n$ {step.command}", flush=True)
        code = subprocess.run(shlex.split(step.command), check=False).returncode
        if code:
            sys.exit(f"the demo met an error: {step.command} ended with {code}")


def check_loss() -> None:
    """Hold the loss on held-out text against what this demo promises."""
    rows = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    loss = [row["eval_loss"] for row in rows if "eval_loss" in row][-1]
    index = json.loads((TOKENS / "index.json").read_text())
    bytes_per_token = index["text_bytes"] / index["tokens"]
    bits = loss / math.log(2) / bytes_per_token
    figures = f"{loss:.3f} nats per token, {bits:.3f} bits per byte"
    if not loss <= HELD_OUT_LOSS:
        sys.exit(f"the demo met an error: held-out loss {figures}; {HELD_OUT_LOSS} was promised")
    print(f"\nheld out: {figures} (promised: {HELD_OUT_LOSS} nats or less)")


if __name__ == "__main__":
    main()
