"""The main job, end to end: look up, describe, check, size, predict, hand over, train, record.

Each command is printed before it runs. The demo times itself: every command becomes a span of a
measured `Timeline`, which the last two commands read and write for the Perfetto UI. Training needs
torch; where it is missing, the demo says so and goes on without.
"""

import json
import math
import shlex
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from meshwright.timeline import TimelineWriter

OUT = Path("demo-out")
WORK = "examples/llama3-70b.toml"
STEP = OUT / "step.json.gz"
RUN = OUT / "run"
TOKENS = OUT / "tokens"
EXPORTED = OUT / "exported"

HELD_OUT_LOSS = 3.55
"""The loss on held-out text that the training must reach, in nats per token."""


class Step(NamedTuple):
    """One command to show."""

    title: str
    command: str
    code: int = 0
    """The exit code it should have: 1 is "the answer is no"."""


PLANNING = (
    Step("What is in the catalog", "mw models --find llama3"),
    Step("One model in full", "mw models llama3.1-70b --sequence-length 8192"),
    Step("The cluster it shall run on", "mw clusters h100-superpod --gpus 512"),
    Step("Does this layout fit this model on this cluster?", f"mw layout check {WORK}"),
    Step("What does it say to a wrong one?", f"mw layout check {WORK} --ep 4 --precision nvfp4", 1),
    Step("How much memory and how many FLOPs does it take?", f"mw layout memory {WORK}"),
    Step("How long is a step, and where does it go?", f"mw simulate {WORK} --timeline {STEP}"),
    Step("What if one thing were different?", f"mw whatif {WORK} nic=x2 precision=fp8"),
    Step("The same layout as Megatron-LM flags", f"mw layout export {WORK} --to megatron"),
    Step(
        "Which all-reduce is fastest on two nodes?",
        "mw collective simulate --cluster h100-superpod --gpus 16 --size 64MiB",
    ),
    Step(
        "What will NCCL pick there, and why?",
        "mw collective explain --cluster h100-superpod --gpus 16",
    ),
)

TRAINING = (
    Step(
        "A tokenizer, learnt from Python's own documentation and sources",
        f"mw data train-tokenizer standard:2MB --size 2048 --out {OUT}/tokenizer.json",
    ),
    Step(
        "The same text, and made-up sums, as tokens",
        f"mw data tokenize standard --tokenizer {OUT}/tokenizer.json --out {TOKENS}",
    ),
    Step(
        "A language model from scratch, in about two minutes on two cores",
        f"mw train examples/train-demo.toml --folder {RUN}",
    ),
)

READING = (
    Step("Its weights, for every tool that reads Hugging Face's", f"mw export {RUN} {EXPORTED}"),
    Step(
        "What has it learnt? Text it goes on with (after ▸), always by the likeliest token",
        f"python examples/generate.py {EXPORTED} 'def __init__(self,' 'The \"with\" statement'",
    ),
    Step(
        "And sums, whose form it learns before their results",
        f"python examples/generate.py {EXPORTED} --line '3 + 4 =' '7 * 6 =' '90 - 40 =' '9 / 2 ='",
    ),
)

RECORD = (
    Step("Where did the demo spend its time?", f"mw timeline show {OUT}/timeline"),
    Step("Open that in the Perfetto UI", f"mw timeline perfetto {OUT}/timeline {OUT}/demo.json.gz"),
)


def main() -> None:
    """Run the steps, and stop at the first that does not end as it should."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    show(PLANNING)
    missing = [name for name in ("torch", "tokenizers", "safetensors") if not find_spec(name)]
    if missing:
        print(f"\n# Training is left out, as it needs {' and '.join(missing)}: make setup")
    else:
        show(TRAINING)
        check_loss()
        show(READING)
    show(RECORD)


def show(steps: tuple[Step, ...]) -> None:
    """Print and run commands, and record how long each took."""
    for step in steps:
        print(f"\n# {step.title}\n$ {step.command}", flush=True)
        start_ns = time.time_ns()
        code = subprocess.run(shlex.split(step.command), check=False).returncode
        with TimelineWriter(OUT / "timeline", rank=0, metadata={"run": "demo"}) as timeline:
            name, taken_ns = step.command, time.time_ns() - start_ns
            timeline.span(name, start_ns, taken_ns, kind="host", lane="demo")
        if code != step.code:
            sys.exit(f"the demo met an error: {name} ended with {code}, not {step.code}")


def check_loss() -> None:
    """Hold the loss on held-out text against what this demo promises."""
    rows = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    loss = [row["held_out_loss"] for row in rows if "held_out_loss" in row][-1]
    index = json.loads((TOKENS / "index.json").read_text())
    bytes_per_token = index["text_bytes"] / index["tokens"]
    bits = loss / math.log(2) / bytes_per_token
    figures = f"{loss:.3f} nats per token, {bits:.3f} bits per byte"
    if not loss <= HELD_OUT_LOSS:
        sys.exit(f"the demo met an error: held-out loss {figures}; {HELD_OUT_LOSS} was promised")
    print(f"\nheld out: {figures} (promised: {HELD_OUT_LOSS} nats or less)")


if __name__ == "__main__":
    main()
