"""What the code for many devices costs on one, where it has nobody to talk to.

The trainer of one device and the same step on a mesh of one take turns, each in a process of its
own; see `train_contenders` for what a step is.
"""

from statistics import median

from benchmarks.train_step import Case, run
from meshwright.errors import MissingDependency

NAME = "parallel_step"
QUESTION = "What does a mesh cost where there is one device?"

SHAPES = (("1b", 8), ("8b", 4))
TURNS = 2


def measure(quick: bool) -> dict[str, object]:
    """Time both in turn; `quick` takes a model that a processor can train."""
    import torch

    if not quick and not torch.cuda.is_available():
        raise MissingDependency(
            "training steps of real models are timed on a GPU", "use --quick here"
        )
    figures: list[dict[str, object]] = []
    for shape, batch in (("tiny", 2),) if quick else SHAPES:
        length = 64 if quick else 4096
        rates: dict[str, list[float]] = {"ours": [], "mesh": []}
        for _ in range(TURNS):
            for contender, found in rates.items():
                found.append(run(Case(contender, shape, "bf16", batch, length)).tokens_per_s)
        alone, mesh = median(rates["ours"]), median(rates["mesh"])
        figures += [
            {"name": f"{shape}: one device", "value": round(alone), "unit": "tokens/s"},
            {"name": f"{shape}: a mesh of one", "value": round(mesh), "unit": "tokens/s"},
            {
                "name": f"{shape}: what the mesh costs",
                "value": round(100 * (alone / mesh - 1), 2),
                "unit": "%",
                "target": "< 1",
            },
        ]
    notes = "bf16 throughout, full steps of AdamW with clipping; the middle of two turns each."
    return {"figures": figures, "peers": [], "notes": notes}
