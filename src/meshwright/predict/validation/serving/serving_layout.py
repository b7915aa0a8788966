"""How a published run laid its model out: degrees from the row's fields, its notes and its source.

One large table (aiconfigurator's measured sample) counts some GPUs twice: where it says that
experts are cut both ways by the same degree, or that attention groups are as many as tensor ranks,
its own names for the runs (`tp8_ep8`) show half of that. Such rows are read as the names say.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from meshwright.predict.validation.serving.serving_recipes import (
    RecipeReplicas,
    ServingRecipe,
    find_recipes,
)
from meshwright.predict.validation.training.run_model import UnusableRowError
from meshwright.spec.layout import Layout

_WORKERS = re.compile(r"(\w+)x\(tp(\w+) pp(\w+) adp(\w+) mtp(\w+) ep(\w+) bs(\w+)\)")

MANY, USUAL_WORKERS, NODE = 200, 4, 8


class ReplicaLayout(NamedTuple):
    """Where a run's replicas lie."""

    layout: Layout
    copies: int
    """Replicas that share the load."""
    prefill: Layout | None = None
    """Layout of replicas that compute prompts alone, where the run was disaggregated."""
    prefill_copies: int = 0
    """Those replicas; 0 takes as many as the decoding ones keep busy."""
    num_speculative_tokens: int = 0
    """Tokens that decoding replicas guess in each step."""
    assumed: tuple[str, ...] = ()


def read_replica_layout(row: Mapping[str, Any], sparse: bool) -> ReplicaLayout | None:
    """Return where a row's model lay, None where the row does not say."""
    notes = str(row.get("notes") or "")
    gpus = _whole(row.get("gpus"))
    if "mode disagg" in notes:
        return _disaggregated(row, notes, sparse)
    if "mode agg" in notes:
        return ReplicaLayout(_measured_sample(row, notes, sparse), 1)
    named = re.search(r"parallelism '([^']*)'", notes)
    if named and named[1].startswith("DEP"):
        size = int(named[1][3:])
        return ReplicaLayout(_layout(1, 1, size, size if sparse else 1), 1)
    tp, pp, ep = _whole(row.get("tp")), _whole(row.get("pp")) or 1, _whole(row.get("ep")) or 1
    if tp is None:
        return None
    if sparse and pp == 1 and _page_shares_attention(row):
        return ReplicaLayout(_layout(1, 1, tp, tp), 1)
    if "attention DP" in notes and gpus and gpus % tp == 0 and sparse:
        return ReplicaLayout(_layout(1, pp, gpus // pp, ep), 1)
    return ReplicaLayout(_layout(tp, pp, 1, ep if sparse else 1), 1)


def _page_shares_attention(row: Mapping[str, Any]) -> bool:
    """Say whether TensorRT-LLM's performance page ran a sparse model with attention data parallel.

    Its options do so since 1.0 for Qwen3 and Llama 4 Maverick. Cards without fast links are listed
    apart, by tensor and pipeline degrees.
    """
    page = "perf-overview" in str(row.get("source"))
    recent = str(row.get("engine_version")).startswith("1.")
    named = re.search(r"qwen3|maverick", str(row.get("model")).lower())
    return page and recent and named is not None and "RTX" not in str(row.get("gpu"))


def _measured_sample(row: Mapping[str, Any], notes: str, sparse: bool) -> Layout:
    found = re.search(r"attention_dp (\w+); moe_tp (\w+)", notes)
    groups, slices = (_whole(found[1]) or 1, _whole(found[2]) or 1) if found else (1, 1)
    tp, pp, ep = (_whole(row.get(name)) or 1 for name in ("tp", "pp", "ep"))
    if 1 < ep == slices and tp * groups == ep * slices:
        tp, groups = (ep, 1) if groups == 1 else (1, ep)
    elif groups > 1 and groups == tp:
        tp, ep = 1, groups
    elif groups == 1 and sparse and ep * slices > tp:
        tp = ep * slices  # its experts lie on more GPUs than it says it had
    return _layout(tp, pp, groups, ep if sparse else 1)


def _disaggregated(row: Mapping[str, Any], notes: str, sparse: bool) -> ReplicaLayout:
    found = _WORKERS.findall(notes)
    if len(found) != 2:
        raise UnusableRowError("the notes do not say how prefill and decode workers are laid out")
    read = []
    for copies, tp, pp, groups, _, ep, _ in found:
        cut, stages, shared, spread = (_whole(text) or 1 for text in (tp, pp, groups, ep))
        layout = _layout(cut, stages, shared, spread if sparse else 1)
        read.append((layout, _whole(copies)))
    (first, firsts), (second, seconds) = read
    if first == Layout() and second != first:
        first = second  # a table without the prefill workers' degrees has ones there
    if firsts is not None and seconds is not None:
        return ReplicaLayout(second, seconds, first, firsts)
    if recipes := _alike(find_recipes(row), second.tp):
        return _as_published(recipes, sparse)
    # Rows of the table that do say: up to some 200 requests at a time nearly all have four or five
    # decode workers that share every product; above, one that shares the experts alone.
    many = re.search(r"\d+", str(row.get("concurrency_or_batch_or_rate")))
    if (many and int(many[0]) > MANY) or second.tp > NODE:
        size = second.tp * second.dp
        second = _layout(1, second.pp, size, size if sparse else 1)
        assumed = "one decode worker of attention data parallel"
        return ReplicaLayout(second, 1, first, 0, assumed=(assumed,))
    return ReplicaLayout(
        second, USUAL_WORKERS, first, 1, assumed=(f"{USUAL_WORKERS} decode workers",)
    )


def _alike(recipes: Iterable[ServingRecipe], tp: int) -> list[ServingRecipe]:
    """Return recipes that differ in their drafts at most; none where it is open which was run.

    Of such that differ otherwise, those may be meant whose decode workers have a row's degree.
    """
    found = list(recipes)
    for some in (found, [one for one in found if tp in (one.decode.tp, one.decode.dp)]):
        if len({(one.prefill, one.decode) for one in some}) == 1:
            return some
    return []


def _as_published(recipes: Sequence[ServingRecipe], sparse: bool) -> ReplicaLayout:
    def lay(workers: RecipeReplicas) -> Layout:
        return _layout(workers.tp, 1, workers.dp, workers.ep if sparse else 1)

    prefill, decode = recipes[0].prefill, recipes[0].decode
    drafts = min(recipe.drafts for recipe in recipes)
    place = ReplicaLayout(lay(decode), decode.copies, lay(prefill), prefill.copies, drafts)
    if len(recipes) == 1:
        return place
    return place._replace(assumed=(f"{drafts} drafts a step" if drafts else "no drafts",))


def _layout(tp: int, pp: int, dp: int, ep: int) -> Layout:
    """Return a layout whose experts are cut as far as the GPUs go beyond `ep`."""
    size = tp * dp
    ep = ep if size % ep == 0 else 1
    return Layout(tp=tp, pp=pp, dp=dp, ep=ep, expert_tp=size // ep)


def _whole(value: object) -> int | None:
    try:
        number = int(str(value))
    except ValueError:
        return None
    return number if 0 < number < 10_000 else None
