"""Requests end once and have all their tokens, whatever happens to them on the way."""

from math import inf
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.policy.serving.scheduler import Sequence
from meshwright.predict.serving.cost.replica import Replica
from meshwright.predict.serving.cost.step_cost import build_step_cost
from meshwright.predict.serving.sim.served_requests import (
    ServedRequests,
    count_slow_gaps,
    list_token_gaps,
)
from meshwright.predict.serving.sim.simulated_engine import (
    EngineSetup,
    SimulatedEngine,
    StepCostModel,
)
from meshwright.predict.serving.sim.simulation import simulate_serving
from meshwright.spec import catalog
from meshwright.spec.scheduler_config import SchedulerConfig
from meshwright.spec.workload import WorkloadRequest


class Flat(NamedTuple):
    """Steps that take a fixed time, some more for each token of prompts, and for each key."""

    step: float = 0.01
    token: float = 1e-4
    key: float = 0.0
    window: float = inf
    host: float = 0.0

    def step_s(
        self,
        *,
        prefill_tokens: int = 0,
        prefill_pairs: float = 0.0,
        decodes: int = 0,
        context_sum: float = 0.0,
        sampled: int | None = None,
        captured: int = 0,
    ) -> float:
        del prefill_pairs, sampled
        tokens = captured - decodes if captured else prefill_tokens
        keys = min(context_sum, self.window * decodes) if decodes else 0.0
        return max(self.step + self.token * tokens + self.key * keys, self.host)

    def fit_decode_cost(self, batch: int, mean_context: float) -> tuple[float, float, float]:
        if mean_context > self.window:
            return max(self.step + self.key * self.window * batch, self.host), 0.0, inf
        if self.step + self.key * batch * mean_context < self.host:
            return self.host, 0.0, min(self.window, (self.host - self.step) / (self.key * batch))
        return self.step, self.key, self.window


FLAT = Flat()
WINDOWED = build_step_cost(
    Replica(model=catalog.get_model("gpt-oss-20b"), cluster=catalog.get_cluster("h200-superpod"))
)
"""Steps of a model whose layers look back 128 tokens, every other one."""


def station(
    blocks: int = 1000, cost: StepCostModel = FLAT, *, ahead: bool = False, **limits: Any
) -> EngineSetup:
    given_ = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "block_size": 4, **limits}
    return EngineSetup(cost, SchedulerConfig(**given_), blocks, async_scheduling=ahead)


def asked(count: int, rate: float, seed: int = 0, most: int = 40) -> list[WorkloadRequest]:
    rng, now, found = Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        prompt, output = rng.randint(1, most), rng.randint(0, most)
        found.append(WorkloadRequest(arrival_s=now, prompt_tokens=prompt, output_tokens=output))
    return found


def is_whole(served: ServedRequests, requests: list[WorkloadRequest]) -> None:
    """Check that everything ended once, in order, with all tokens."""
    assert served.completed.all()
    assert (served.first_s > served.arrival_s).all()
    assert (served.end_s >= served.first_s).all()
    outputs = [max(1, one.output_tokens) for one in requests]
    assert served.output_tokens.tolist() == outputs
    missing = sum(outputs) - len(outputs) - list_token_gaps(served).counts.sum()
    # One that makes room before it got on where it was moved to has two gaps for one token.
    assert abs(missing) <= (served.preemptions.sum() if served.prefill_engines else 0)
    for did in served.engines:
        assert (did.end_s >= did.start_s).all()
        assert (did.start_s[1:] >= did.end_s[:-1] - 1e-12).all()


def test_a_step_with_prompts_is_padded_where_it_is_captured() -> None:
    request = [WorkloadRequest(arrival_s=0.0, prompt_tokens=40, output_tokens=1)]
    as_it_is, padded, too_long = (
        simulate_serving(request, [station(max_cudagraph_capture_size=most)]).first_s[0]
        for most in (0, 64, 32)
    )
    assert padded - as_it_is == pytest.approx(24 * FLAT.token)
    assert too_long == as_it_is


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("blocks", [1000, 30])
def test_every_request_ends_once_with_all_its_tokens(chunked: bool, blocks: int) -> None:
    requests = asked(200, 8)
    served = simulate_serving(requests, [station(blocks, enable_chunked_prefill=chunked)])
    is_whole(served, requests)
    assert bool(served.preemptions.sum()) == (blocks == 30)
    computed = sum(did.prompt_tokens.sum() for did in served.engines)
    prompts = sum(one.prompt_tokens for one in requests)
    assert computed == prompts if blocks == 1000 else computed > prompts


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 0.5), st.integers(1, 60), st.integers(0, 60)),
        min_size=1,
        max_size=40,
    ),
    st.integers(31, 80),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(["round-robin", "least-loaded", "prefix"]),
    st.tuples(st.booleans(), st.booleans()),
)
def test_nothing_is_lost_with_few_blocks_and_many_engines(
    rows: list[tuple[float, int, int]],
    blocks: int,
    engines: int,
    routing: Any,
    apart_ahead: tuple[bool, bool],
) -> None:
    apart, ahead = apart_ahead
    now, requests = 0.0, []
    for gap, prompt, output in rows:
        now += gap
        shared = tuple(range(prompt // 8))
        requests.append(
            WorkloadRequest(
                arrival_s=now, prompt_tokens=prompt, output_tokens=output, prefix_blocks=shared,
                block_tokens=8,
            )
        )  # fmt: skip
    stations = [station(blocks, Flat(key=1e-5), ahead=ahead)] * engines
    prefill = [station(blocks, ahead=ahead)] if apart else []
    served = simulate_serving(
        requests, stations, routing=routing, prefill=prefill, transfer=lambda n: 1e-3 * n
    )
    is_whole(served, requests)
    assert served.prefill_engines == len(prefill)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("cost", "most", "rate"),
    [
        (Flat(key=1e-5), 60, 5),
        (Flat(key=1e-3, window=40.5), 60, 5),
        (Flat(key=1e-4, host=0.02), 60, 5),
        (WINDOWED, 200, 10),
    ],
    ids=["plain", "window", "host", "gpt-oss"],
)
def test_many_steps_at_once_are_the_same_as_one_by_one(
    cost: StepCostModel, most: int, rate: float, ahead: bool
) -> None:
    requests = asked(60, rate, most=most)
    leapt = simulate_serving(requests, [station(most, cost, ahead=ahead)])
    engine = SimulatedEngine(station(most, cost))
    batcher, now, place = engine.scheduler, 0.0, 0
    decided = 0.0
    first, end = [-1.0] * len(requests), [0.0] * len(requests)
    while place < len(requests) or batcher.num_running or batcher.waiting_queue:
        while place < len(requests) and requests[place].arrival_s <= decided:
            one = requests[place]
            batcher.add(Sequence(one.prompt_tokens, max(1, one.output_tokens), state=place))
            place += 1
        batch = batcher.schedule()
        if batch is None:
            if place < len(requests):
                decided = now = max(now, requests[place].arrival_s)
                continue
            break
        decided = now
        now += engine._price(batch)
        for sequence in batch.started_decoding:
            if first[sequence.state] < 0:
                first[sequence.state] = now
        for sequence in batch.finished:
            end[sequence.state] = now
        decided = decided if ahead else now
    assert leapt.preemptions.sum() > 0
    np.testing.assert_allclose(leapt.first_s, first)
    np.testing.assert_allclose(leapt.end_s, end)


def test_who_comes_when_the_next_step_is_decided_waits_for_both() -> None:
    times = (0.0, 0.004)
    requests = [WorkloadRequest(arrival_s=at, prompt_tokens=1, output_tokens=9) for at in times]
    at_once, ahead = (
        simulate_serving(requests, [station(cost=Flat(token=0.0), ahead=ahead)])
        for ahead in (False, True)
    )
    assert at_once.first_s[1] == pytest.approx(0.02)
    assert ahead.first_s[1] == pytest.approx(0.03)
    # For the whole of the step that was decided it is seen to wait.
    assert at_once.engines[0].waiting.sum() == 0
    assert ahead.engines[0].waiting.sum() == 1


def test_who_leaves_before_anybody_decided_is_forgotten() -> None:
    engine = SimulatedEngine(station(ahead=True))
    engine.add_sequence(Sequence(1, 9, state=0), 0.0)
    engine.wake_up(0.0)
    engine.start_step(0.0)
    late = Sequence(1, 9, state=1)
    engine.add_sequence(late, 0.004)
    assert engine.waiting == 1
    engine.remove(late)
    engine.finish_step()
    engine.start_step(0.01)
    assert (engine.waiting, engine.scheduler.num_running) == (0, 1)


def test_one_at_a_time_waits_as_long_as_theory_says() -> None:
    # M/D/1: the mean wait is ρ / (2 μ (1 − ρ)).
    service, load, count = 0.1, 0.7, 20_000
    rng, now, requests = Random(3), 0.0, []
    for _ in range(count):
        now += rng.expovariate(load / service)
        requests.append(WorkloadRequest(arrival_s=now, prompt_tokens=1, output_tokens=1))
    cost = Flat(step=service, token=0.0)
    served = simulate_serving(
        requests, [station(cost=cost, max_num_seqs=1, enable_prefix_caching=False)]
    )
    wait = (served.end_s - served.arrival_s).mean() - service
    assert wait == pytest.approx(service * load / (2 * (1 - load)), rel=0.05)


def test_so_many_in_flight_are_never_more_nor_fewer() -> None:
    requests = [WorkloadRequest(arrival_s=0.0, prompt_tokens=5, output_tokens=11)] * 20
    served = simulate_serving(requests, [station()], in_flight=4)
    events = sorted([(at, 1) for at in served.arrival_s] + [(at, -1) for at in served.end_s])
    open_now = np.cumsum([step for _, step in events])
    assert open_now.max() == 4
    assert served.end_s.max() == pytest.approx(5 * (11 * 0.01 + 4 * 5e-4))


def test_what_lies_around_an_engine_counts_in_its_steps_and_stretches_no_gap() -> None:
    requests = asked(100, 8)
    plain, late = (
        simulate_serving(requests, [station()._replace(delay_s=0.1 * much, delay_steps=3.0 * much)])
        for much in (0, 1)
    )
    assert late.first_s == pytest.approx(plain.first_s + 0.1 + 3 * FLAT.step)
    assert late.end_s == pytest.approx(plain.end_s + 0.1 + 3 * FLAT.step)
    assert late.seconds == pytest.approx(plain.seconds), "engines are done as early"
    for longest_s in (0.005, 0.012, 0.1):
        assert (
            count_slow_gaps(late, longest_s).tolist() == count_slow_gaps(plain, longest_s).tolist()
        )
    # Who keeps so many in flight sends the next one that much later.
    alike = [WorkloadRequest(arrival_s=0.0, prompt_tokens=5, output_tokens=11)] * 20
    served = simulate_serving(alike, [station()._replace(delay_steps=3.0)], in_flight=4)
    assert served.end_s.max() == pytest.approx(5 * (11 * 0.01 + 4 * 5e-4 + 3 * 0.01))


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("in_flight", [None, 8])
def test_prompts_and_waiting_are_no_part_of_what_lies_around_an_engine(
    chunked: bool, in_flight: int | None
) -> None:
    # Prompts take a hundred times as long as a step, and those of others come between tokens.
    dear = station(40, Flat(token=0.05), enable_chunked_prefill=chunked)._replace(delay_steps=20.0)
    for outputs in (1, 2, 9):
        requests = [
            WorkloadRequest(arrival_s=0.1 * number, prompt_tokens=20, output_tokens=outputs)
            for number in range(40)
        ]
        served = simulate_serving(requests, [dear], in_flight=in_flight)
        assert served.delay_s == pytest.approx(20 * FLAT.step)


def test_steps_around_an_engine_are_those_of_the_batch_that_is_joined() -> None:
    cost = Flat(key=1e-4, token=0.0)
    requests = [
        WorkloadRequest(arrival_s=at, prompt_tokens=10, output_tokens=outputs)
        for at, outputs in ((0.0, 30), (0.1, 30), (9.0, 1))
    ]
    first, second, alone = simulate_serving(
        requests, [station(cost=cost)._replace(delay_steps=1.0)]
    ).delay_s
    assert first == pytest.approx(cost.step + 11 * cost.key)
    assert second > first + 11 * cost.key
    assert alone == pytest.approx(cost.step + 10 * cost.key)
    moved = simulate_serving(
        requests, [station(cost=cost)], prefill=[station()._replace(delay_steps=1.0)]
    ).delay_s
    # Where prompts are apart, steps are those of who decodes.
    assert moved[0] == pytest.approx(cost.step + 10 * cost.key)
    assert moved[1] > moved[0]


def test_what_never_fits_is_refused_and_the_others_go_on() -> None:
    requests = [
        WorkloadRequest(arrival_s=0.0, prompt_tokens=100, output_tokens=5),
        WorkloadRequest(arrival_s=0.0, prompt_tokens=4, output_tokens=5),
    ]
    served = simulate_serving(requests, [station(8)], in_flight=1)
    assert served.completed.tolist() == [False, True]
    assert np.isnan(served.end_s[0])


def test_engines_for_prompts_alone_need_no_room_for_answers() -> None:
    lengths = ((32, 60), (33, 60), (32, 90))
    requests = [
        WorkloadRequest(arrival_s=0.0, prompt_tokens=p, output_tokens=o) for p, o in lengths
    ]
    served = simulate_serving(
        requests, [station(23)], prefill=[station(8)], transfer=lambda _: 0.001
    )
    # Thirty-two tokens fit before, and ninety-two behind.
    assert served.completed.tolist() == [True, False, False]


def test_shared_beginnings_are_computed_once() -> None:
    requests = [
        WorkloadRequest(
            arrival_s=float(number), prompt_tokens=40, output_tokens=2, prefix_blocks=(1, 2),
            block_tokens=16,
        )
        for number in range(3)
    ]  # fmt: skip
    served = simulate_serving(requests, [station()])
    assert served.cached_tokens.tolist() == [0, 32, 32]
    assert served.engines[0].prompt_tokens.sum() == 40 + 8 + 8


def test_prompts_handed_over_take_their_way_and_hold_each_other_up() -> None:
    requests = [WorkloadRequest(arrival_s=0.0, prompt_tokens=16, output_tokens=5)] * 2
    served = simulate_serving(
        requests, [station()], prefill=[station()], transfer=lambda tokens: tokens * 0.01
    )
    made = 0.01 + 2 * 16 * 1e-4  # both prompts in one step
    # One link: the second prompt travels after the first.
    np.testing.assert_allclose(served.first_s, [made + 0.16, made + 0.32])
    # Nobody else is there: four steps.
    assert served.end_s[0] == pytest.approx(made + 0.16 + 4 * 0.01)
    assert served.engine.tolist() == [1, 1]


def test_groups_of_an_engine_send_and_receive_by_themselves() -> None:
    requests = [WorkloadRequest(arrival_s=0.0, prompt_tokens=16, output_tokens=5)] * 4
    made = 0.01 + 4 * 16 * 1e-4  # all prompts in one step
    for groups, waves in (((1, 1), (1, 2, 3, 4)), ((2, 2), (1, 1, 2, 2)), ((1, 4), (1, 2, 3, 4))):
        before, after = (station()._replace(dp_groups=count) for count in groups)
        served = simulate_serving(requests, [after], prefill=[before], transfer=lambda n: n * 0.01)
        np.testing.assert_allclose(served.first_s, [made + 0.16 * wave for wave in waves])


def test_an_engine_without_room_holds_up_those_before_it() -> None:
    requests = [WorkloadRequest(arrival_s=0.0, prompt_tokens=24, output_tokens=17)] * 3
    # Ten blocks of four tokens hold one answer. The engine before keeps one prompt, makes one.
    served = simulate_serving(
        requests, [station(10)], prefill=[station(12)], transfer=lambda _: 0.001
    )
    is_whole(served, requests)
    assert served.preemptions.sum() == 0
    first, second, third = served.first_s
    assert second > served.end_s[0]
    assert third > served.end_s[1]
    assert served.engines[0].start_s[-1] == pytest.approx(first)  # a block came free


def test_slow_gaps_are_counted_for_each_request() -> None:
    requests = [
        WorkloadRequest(arrival_s=0.0, prompt_tokens=4, output_tokens=40),
        WorkloadRequest(arrival_s=0.2, prompt_tokens=60, output_tokens=3),
    ]
    # The second prompt holds up the first answer for one long step.
    served = simulate_serving(requests, [station(cost=Flat(token=1e-2))])
    assert count_slow_gaps(served, 0.1).tolist() == [1, 0]
    apart = simulate_serving(
        requests, [station(cost=Flat(token=1e-2), enable_chunked_prefill=False)]
    )
    assert count_slow_gaps(apart, 0.1).tolist() == [1, 0]
    assert list_token_gaps(apart).seconds.max() == pytest.approx(0.01 + 0.6 + 0.01)


def test_blocks_that_move_to_the_host_and_back_take_their_time() -> None:
    requests = [WorkloadRequest(arrival_s=0.0, prompt_tokens=16, output_tokens=17)] * 2
    swap: dict[str, Any] = {"preemption_mode": "swap", "num_cpu_blocks": 100}
    free = simulate_serving(requests, [station(12, **swap)])
    dear = simulate_serving(requests, [station(12, **swap)._replace(swap_s=0.05)])
    assert free.preemptions.sum() == dear.preemptions.sum() == 1
    # Both had six of the twelve blocks when one of them went, and came back later.
    assert dear.end_s.max() - free.end_s.max() == pytest.approx(2 * 6 * 0.05)
