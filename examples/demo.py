"""The main job, end to end: look up, describe, check, size, predict, hand over, record.

Each command is printed before it runs. The demo times itself: every command becomes a span of a
measured `Timeline`, which the last two commands read and write for the Perfetto UI.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

from meshwright.timeline import TimelineWriter

OUT = Path("demo-out")
WORK = "examples/llama3-70b.toml"
STEP = OUT / "step.json.gz"


# Title, command, and the exit code it should have: 1 is "the answer is no".
STEPS = (
    ("What is in the catalog", "mw models --find llama3", 0),
    ("One model in full", "mw models llama3.1-70b --sequence-length 8192", 0),
    ("The cluster it shall run on", "mw clusters h100-superpod --gpus 512", 0),
    ("Does this layout fit this model on this cluster?", f"mw layout check {WORK}", 0),
    ("What does it say to a wrong one?", f"mw layout check {WORK} --ep 4 --precision nvfp4", 1),
    ("How much memory and how many FLOPs does it take?", f"mw layout memory {WORK}", 0),
    ("How long is a step, and where does it go?", f"mw simulate {WORK} --timeline {STEP}", 0),
    ("What if one thing were different?", f"mw whatif {WORK} nic=x2 precision=fp8", 0),
    ("The same layout as Megatron-LM flags", f"mw layout export {WORK} --to megatron", 0),
    (
        "Which all-reduce is fastest on two nodes?",
        "mw collective simulate --cluster h100-superpod --gpus 16 --size 64MiB",
        0,
    ),
    (
        "What will NCCL pick there, and why?",
        "mw collective explain --cluster h100-superpod --gpus 16",
        0,
    ),
    ("Where did the demo spend its time?", f"mw timeline show {OUT}/timeline", 0),
    ("Open that in the Perfetto UI", f"mw timeline perfetto {OUT}/timeline {OUT}/demo.json.gz", 0),
)


def main() -> None:
    """Run the steps, and stop at the first that does not end as it should."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    for title, command, expected in STEPS:
        print(f"\n# {title}\n$ {command}", flush=True)
        start_ns = time.time_ns()
        code = subprocess.run(command.split(), check=False).returncode
        with TimelineWriter(OUT / "timeline", rank=0, metadata={"run": "demo"}) as timeline:
            timeline.span(command, start_ns, time.time_ns() - start_ns, kind="host", lane="demo")
        if code != expected:
            sys.exit(f"the demo met an error: {command} ended with {code}, not {expected}")


if __name__ == "__main__":
    main()
