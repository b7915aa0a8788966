"""What a published case would take: the one place that chooses how a run is simulated."""

from functools import lru_cache
from heapq import heappop, heappush, heapreplace
from math import ceil
from typing import NamedTuple

from msgspec.structs import replace

from meshwright.predict.serving.cost.kv_memory import ServingMemory, predict_serving_memory
from meshwright.predict.serving.cost.replica import Replica
from meshwright.predict.serving.cost.step_cost import StepCost, build_step_cost
from meshwright.predict.serving.sim.uniform_flow import (
    GOLDEN_RATIO,
    UniformLoad,
    simulate_uniform_flow,
)
from meshwright.predict.validation.serving.serving_case import ServingCase
from meshwright.predict.validation.training.run_model import UnusableRowError

KV_WIRE_S = 20e-3
"""Handing a prompt's keys and values over to another worker (Mooncake's rows: 2 to 20 ms)."""
PREFILL_UTILIZATION = 0.8
"""Share of their time that prefill workers are busy where a row does not say how many."""
DRAFT_ACCEPTANCE = 0.59
"""Chance that a draft is taken, given those before it: with it, the times between tokens of half of
the rows whose every recipe drafts are right in the middle; the other half says 0.58. DeepSeek's own
0.85 to 0.9 (arXiv 2412.19437, 5.4.3) is for first drafts of real text."""
MAX_MEMORY_SHARE = 0.97
"""Share of the memory that an engine can be told to take."""
MAX_SIMULATED_REQUESTS = 20_000
"""Requests that a closed loop is followed for."""
SIMULATED_BATCHES = 4
"""Batches that a long run is followed for."""


class CasePrediction(NamedTuple):
    """The prediction of a run."""

    output_tok_s: float
    ttft_s: float | None
    tpot_s: float | None
    replica: Replica
    batch: float


def predict_case(case: ServingCase) -> CasePrediction:
    """Return the prediction of a case; of several possible layouts that which serves most."""
    if not case.load.is_static_batch:
        case = case._replace(
            replicas=tuple(map(_fitted, case.replicas)),
            prefill=None if case.prefill is None else _fitted(case.prefill),
        )
    if case.prefill is not None:
        return _disaggregated(case)
    tried = [
        _together(replica, copies, case)
        for replica, copies in zip(case.replicas, case.copies, strict=True)
        if _memory(replica).fits or case.load.is_static_batch
    ]
    if not tried:
        raise UnusableRowError("the weights do not fit")
    return max(tried, key=lambda priced: priced.output_tok_s)


@lru_cache(maxsize=4096)
def _memory(
    replica: Replica, tokens: int | None = None, requests: int | None = None
) -> ServingMemory:
    return predict_serving_memory(replica, tokens, requests)


def _fitted(replica: Replica) -> Replica:
    """Return a replica that ran although it should not fit: with nearly all of the memory."""
    if _memory(replica).fits:
        return replica
    engine = replace(
        replica.engine,
        memory_budget="of_all",
        gpu_memory_utilization=MAX_MEMORY_SHARE,
        reserve_bytes=1e9,
    )
    return replace(replica, engine=engine)


def _together(replica: Replica, copies: int, case: ServingCase) -> CasePrediction:
    load, asked = case.load.request_load, case.load
    if asked.is_offline:
        return _offline(replica, copies, case)
    share = replace(
        load,
        requests=max(1, load.requests // copies),
        concurrency=None if load.concurrency is None else max(1, load.concurrency // copies),
        rate_per_s=None if load.rate_per_s is None else load.rate_per_s / copies,
    )
    requests, tokens = asked.compiled_limits or infer_scheduler_config(
        replica, share, static=asked.is_static_batch
    )
    return _priced(replica, copies, share, requests, tokens)


@lru_cache(maxsize=1 << 14)
def _priced(
    replica: Replica, copies: int, load: UniformLoad, requests: int, tokens: int
) -> CasePrediction:
    memory = _memory(replica, min(tokens, 32768), requests)
    went = simulate_uniform_flow(
        build_step_cost(replica), memory, load, batch_requests=requests, batch_tokens=tokens
    )
    tpot = went.tpot_s if load.output_tokens > 1 else None
    return CasePrediction(
        copies * went.output_tok_s, went.ttft_s, tpot, replica, went.mean_decode_batch
    )


def infer_scheduler_config(
    replica: Replica, load: UniformLoad, *, static: bool = False
) -> tuple[int, int]:
    """Return requests and tokens of a step at most.

    TensorRT-LLM's benchmark chooses them from the room for keys and values and from the lengths
    (its `tuning.py`); other engines have defaults.
    """
    engine, layout = replica.engine, replica.layout
    if static:
        return load.requests, int(load.requests * load.prompt_tokens) + 1
    if not engine.name.startswith("TensorRT"):
        return engine.max_num_seqs * layout.dp, engine.max_num_batched_tokens * layout.dp
    if load.concurrency is not None:
        return max(load.concurrency, layout.dp), engine.max_num_batched_tokens * layout.dp
    fitting = min(_memory(replica).requests(load.prompt_tokens + load.output_tokens), 4096)
    each = max(1, fitting // layout.pp)
    tokens = max(2048, min(each * (1 + load.prompt_tokens / load.output_tokens), 32768))
    return max(64, fitting) * layout.dp, int(tokens) * layout.dp


def _offline(replica: Replica, copies: int, case: ServingCase) -> CasePrediction:
    """Return a long run's throughput, under a rate where there is one."""
    load, beams = case.load.request_load, case.load.beams
    requests, tokens = infer_scheduler_config(replica, replace(load, rate_per_s=None))
    batch = min(requests, _memory(replica).requests(load.prompt_tokens + load.output_tokens))
    longer = replace(load, requests=max(16, SIMULATED_BATCHES * batch), rate_per_s=None)
    most = _priced(replica, copies, longer, requests, tokens)
    if load.rate_per_s is None:
        return most._replace(output_tok_s=most.output_tok_s / beams, ttft_s=None, tpot_s=None)
    rate = load.rate_per_s * beams
    paced = replace(load, rate_per_s=rate / copies, requests=max(64, min(6 * batch, 20_000)))
    went = _priced(replica, copies, paced, requests, tokens)
    served = min(rate * load.output_tokens, most.output_tok_s) / beams
    return went._replace(output_tok_s=served)


def _disaggregated(case: ServingCase) -> CasePrediction:
    """Return the steady state of prompts on some workers and decoding on others."""
    load, decode = case.load.request_load, case.replicas[0]
    prefill = case.prefill
    assert prefill is not None
    if not (_memory(decode).fits and _memory(prefill).fits):
        raise UnusableRowError("the weights do not fit")
    first, later = build_step_cost(prefill), build_step_cost(decode)
    prompt, groups = round(load.prompt_tokens), prefill.layout.dp
    own = first.step_s(
        prefill_tokens=prompt * groups, prefill_pairs=groups * prompt * prompt / 2, sampled=groups
    )
    context = load.prompt_tokens + load.output_tokens / 2
    fitting = decode.layout.dp * _memory(decode).requests(load.prompt_tokens + load.output_tokens)
    inside = load.concurrency or load.requests
    ttft, tpot = own, 0.0
    for _ in range(6):
        batch = inside * max(0.05, 1 - ttft / (ttft + load.output_tokens * max(tpot, 1e-4)))
        each = max(1, min(fitting, round(batch / case.copies[0])))
        tpot = _token_s(later, each, context, case.num_speculative_tokens)
        life = ttft + load.output_tokens * tpot
        wanted = inside / life * own / groups
        workers = case.prefill_copies or max(1, ceil(wanted / PREFILL_UTILIZATION))
        waited = _waited_s(load, inside, workers * groups, (own, tpot))
        late = prefill.engine.frontend_s + prefill.engine.frontend_steps * tpot
        ttft = 0.5 * (ttft + waited + KV_WIRE_S + late)
    made = inside * load.output_tokens / (ttft + load.output_tokens * tpot)
    return CasePrediction(made, ttft, tpot, decode, each)


def _token_s(cost: StepCost, requests: int, context: float, drafts: int) -> float:
    """Return the mean time between tokens of requests that decode together.

    Each step checks the drafts of the one before, as more tokens of the same contexts; the layer
    that guesses runs once for each draft.
    """
    if not drafts:
        return cost.decode_steps_s(requests, requests * context, 1)
    tokens = requests * (1 + drafts)
    step_s = cost.step_s(decodes=tokens, context_sum=requests * context, sampled=tokens)
    step_s *= 1 + drafts / cost.replica.model.layers
    return step_s / sum(DRAFT_ACCEPTANCE**place for place in range(drafts + 1))


def _waited_s(load: UniformLoad, inside: int, servers: int, times: tuple[float, float]) -> float:
    """Return the mean time that prompts wait and take, as each client sends one after the other.

    All come at once at first, and since all decode at one pace they come in waves for long.
    """
    own, tpot = times
    clients = [0.0] * inside
    free = [0.0] * servers
    total, sent = 0.0, min(10 * inside, MAX_SIMULATED_REQUESTS)
    for number in range(sent):
        came = heappop(clients)
        done = max(came, free[0]) + own
        heapreplace(free, done)
        total += done - came
        share = 1.0 + load.output_half_width * (2.0 * ((number * GOLDEN_RATIO) % 1.0) - 1.0)
        heappush(clients, done + share * load.output_tokens * tpot)
    return total / sent
