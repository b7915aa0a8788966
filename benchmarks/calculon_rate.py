"""Times Calculon's search for an optimal execution, in a process and an interpreter of its own.

Calculon (github.com/calculon-ai/calculon) tries one group of configurations after the other: a
group has its degrees, interleaving, recompute, sharding and kind of tensor communication, and
`OptimalExecution.search` runs what else there is to choose. Groups differ in cost, so they are
taken in a random order and stopped when a budget of CPU seconds is spent; at the end all have been
taken, or a fair draw of them. Needs what Calculon needs (numpy, pandas, psutil), nothing of ours.

    python calculon_rate.py DIR CPU_SECONDS
"""

import copy
import importlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

GPUS, BATCH, DATATYPE = 4096, 4096, "float16"
MODEL, SYSTEM = "models/megatron-1T.json", "systems/a100_80g.json"
TOP, SEED = 5, 0
"""`-t 5`: as many of the best are kept."""


def groups(llm: Any, app: Any, system: Any) -> list[tuple[Any, ...]]:
    """List the groups as `llm-optimal-execution -m -t 5` makes them."""
    found = []
    for tp in llm.Llm.get_all_tensor_parallelisms(GPUS, app.hidden, app.attn_heads):
        for pp in llm.Llm.get_all_pipeline_parallelisms(GPUS, tp, app.num_blocks):
            dp = llm.Llm.get_data_parallelism(GPUS, tp, pp)
            batch = llm.OptimalExecution.get_batch_size(dp, BATCH)
            if batch is None:
                continue
            found += [
                (
                    False, TOP, False, GPUS, BATCH, DATATYPE, app, system, tp, pp, dp, chunks,
                    batch, recompute, sharding, kind, [True], True, True, True,
                )
                for chunks in llm.Llm.get_valid_pipeline_interleavings(app.num_blocks, pp)
                for recompute in ("full", "attn_only", "none")
                for sharding in ([True, False] if dp > 1 else [False])
                for kind in ("ar", "p2p_rs_ag", "rs_ag")
            ]  # fmt: skip
    return found


def main(folder: Path, budget_s: float) -> dict[str, float]:
    """Search until the budget is spent; return what was tried and what it took."""
    sys.path.insert(0, str(folder))
    calculon, llm = (importlib.import_module(name) for name in ("calculon", "calculon.llm"))
    about = json.loads((folder / SYSTEM).read_text(encoding="utf-8"))
    offload = copy.deepcopy(about)
    offload["mem2"]["GiB"] = 0  # no offload tier
    app = llm.Llm.Application(json.loads((folder / MODEL).read_text(encoding="utf-8")))
    every = groups(llm, app, calculon.System(offload))
    random.Random(SEED).shuffle(every)
    tried = fit = taken = 0
    best: list[Any] = []
    start_s = time.process_time()
    for group in every:
        found, ran, good, *_ = llm.OptimalExecution.search(*group)
        best = llm.OptimalExecution.update_list(best, found, TOP)
        tried, fit, taken = tried + ran, fit + good, taken + 1
        if time.process_time() - start_s > budget_s:
            break
    spent_s = time.process_time() - start_s
    # The loops alone, nothing run and nothing left out: how many configurations there are.
    counted = sum(llm.OptimalExecution.search(True, *g[1:17], False, *g[18:])[1] for g in every)
    return {
        "tried": tried, "fit": fit, "groups": taken, "all_groups": len(every),
        "cpu_s": spent_s, "configurations": counted,
        "best_step_s": BATCH / best[0][0] if best else 0.0,
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), float(sys.argv[2]))))
