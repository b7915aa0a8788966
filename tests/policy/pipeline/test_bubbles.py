"""Idle time and held activations equal the published formulas.

The bubble is what the longest-running rank idles between its first and its last action, as Qi et
al. 2024 (arXiv 2401.10241) count it. F, I and W are the lengths of forward, backward-input and
backward-weight of one chunk, B = I + W.
"""

from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwright.policy.pipeline import PipelineSchedule, build_schedule, count_in_flight
from meshwright.spec.layout import ScheduleKind
from tests.policy.pipeline.reference import Number, execute

RANKS = st.integers(2, 7)
LENGTH = st.integers(1, 12)


def bubble(schedule: PipelineSchedule, f: Number = 1, i: Number = 1, w: Number = 1) -> Number:
    run = execute(schedule, f, i, w)
    assert run.finished
    cost = {"F": f, "I": i, "W": w, "B": i + w}
    loads = {sum(cost[action.op] for action in lane) for lane in schedule.actions}
    assert len(loads) == 1, "every rank does the same work"
    return run.longest_rank - loads.pop()


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@given(p=RANKS, more=st.integers(0, 12), f=LENGTH, b=LENGTH)
def test_gpipe_and_1f1b_idle_p_minus_1_forwards_and_backwards(
    kind: ScheduleKind, p: int, more: int, f: int, b: int
) -> None:
    # Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1: (p - 1)(F + B).
    assert bubble(build_schedule(kind, p, p + more), f, b, 0) == (p - 1) * (f + b)


@given(p=RANKS, v=st.integers(2, 4), rounds=st.integers(1, 4), f=LENGTH, b=LENGTH)
def test_interleaving_divides_the_bubble_by_the_chunks_per_rank(
    p: int, v: int, rounds: int, f: int, b: int
) -> None:
    # Narayanan et al. 2021, section 2.2.2: (p - 1)(F + B) / v with F and B of a whole rank, so
    # (p - 1)(F + B) of one chunk; for backwards that are no shorter than forwards.
    assume(b >= f)
    schedule = build_schedule("interleaved", p, rounds * p, virtual_stages=v)
    assert bubble(schedule, f, b, 0) == (p - 1) * (f + b)


@given(p=RANKS, more=st.integers(0, 12), f=LENGTH, i=LENGTH, w=LENGTH)
def test_zb_h1_idles_p_minus_1_times_f_plus_i_minus_w(
    p: int, more: int, f: int, i: int, w: int
) -> None:
    # Qi et al. 2024, arXiv 2401.10241, table 2: (p - 1)(F + I - W); a third of 1F1B's if all are
    # equal.
    assume(w <= f and w <= i)
    assert bubble(build_schedule("zb-h1", p, 2 * p + more), f, i, w) == (p - 1) * (f + i - w)


@given(p=RANKS, more=st.integers(0, 12))
def test_zb_h2_never_idles_where_the_passes_are_equal(p: int, more: int) -> None:
    # Qi et al. 2024, arXiv 2401.10241, table 2: (p - 1)(F + I - 2W) = 0.
    assert bubble(build_schedule("zb-h2", p, 2 * p - 1 + more)) == 0


@given(p=RANKS, more=st.integers(0, 12), f=LENGTH, i=LENGTH, w=LENGTH)
def test_zb_h2_idles_p_minus_1_times_f_plus_i_minus_2w(
    p: int, more: int, f: int, i: int, w: int
) -> None:
    assume(w <= f and w <= i)
    schedule = build_schedule("zb-h2", p, 4 * p + more)
    assert bubble(schedule, f, i, w) == (p - 1) * (f + i - 2 * w)


@given(p=RANKS, more=st.integers(0, 12))
def test_zb_v_never_idles_where_the_passes_are_equal(p: int, more: int) -> None:
    # Qi et al. 2024, arXiv 2401.10241, section 6.
    assert bubble(build_schedule("zb-v", p, 2 * p - 1 + more)) == 0


@given(half=st.integers(1, 4), more=st.integers(0, 8), f=LENGTH, w=LENGTH)
def test_dualpipe_idles_as_the_deepseek_report_says(half: int, more: int, f: int, w: int) -> None:
    # DeepSeek-V3 report, arXiv 2412.19437, table 2: (p/2 - 1)(F&B + B - 3W), exact where forward
    # and backward-input are equally long and overlapping gains nothing.
    assume(w <= f)
    schedule = build_schedule("dualpipe", 2 * half, 4 * half + 2 * more)
    assert bubble(schedule, f, f, w) == (half - 1) * ((2 * f + w) + (f + w) - 3 * w)


@given(half=st.integers(1, 4), more=st.integers(0, 8), pair=st.fractions(2, 3))
def test_dualpipe_idles_as_reported_where_overlapping_gains(
    half: int, more: int, pair: Fraction
) -> None:
    # The same formula with F = I = W = 1 and a shorter F&B. Ranks at the ends then overlap more
    # pairs than those in the middle, so it holds for the middle ones, counted from the start.
    schedule = build_schedule("dualpipe", 2 * half, 4 * half + 2 * more)
    run = execute(schedule, overlapped=pair)
    middle = schedule.actions[half]
    pairs = sum(action.is_concurrent for action in middle)
    load = 3 * schedule.microbatches - pairs * (3 - pair)
    assert run.last[half] - load == (half - 1) * (pair + 2 - 3)


@given(p=st.integers(2, 6), more=st.integers(0, 8))
def test_dualpipe_v_idles_as_dualpipe_over_twice_the_ranks(p: int, more: int) -> None:
    # DeepSeek's DualPipe repository: the same formula over 2p stages.
    assert bubble(build_schedule("dualpipe-v", p, 2 * p + more)) == (p - 1) * (3 + 2 - 3)


@given(p=RANKS, m=st.integers(1, 20))
def test_1f1b_holds_one_microbatch_per_later_rank(p: int, m: int) -> None:
    assert count_in_flight(build_schedule("1f1b", p, m)) == tuple(
        min(m, p - rank) for rank in range(p)
    )


@given(p=RANKS, m=st.integers(1, 20))
def test_gpipe_holds_every_microbatch(p: int, m: int) -> None:
    assert count_in_flight(build_schedule("gpipe", p, m)) == (m,) * p


@given(p=RANKS, v=st.integers(2, 4), rounds=st.integers(1, 5))
def test_interleaving_holds_a_round_more_per_further_chunk(p: int, v: int, rounds: int) -> None:
    # Megatron-Core's warm-up, 2(p - rank - 1) + (v - 1)p, and the forward in hand.
    schedule = build_schedule("interleaved", p, rounds * p, virtual_stages=v)
    expected = (2 * (p - rank - 1) + (v - 1) * p + 1 for rank in range(p))
    assert count_in_flight(schedule) == tuple(min(n, v * rounds * p) for n in expected)


@given(p=RANKS, m=st.integers(1, 30))
def test_zb_h1_holds_p_and_zb_h2_nearly_twice_that_on_every_rank(p: int, m: int) -> None:
    # Qi et al. 2024, arXiv 2401.10241, table 2: p and 2p - 1 microbatches.
    assert count_in_flight(build_schedule("zb-h1", p, m)) == (min(m, p),) * p
    assert count_in_flight(build_schedule("zb-h2", p, m)) == (min(m, 2 * p - 1),) * p


@given(p=RANKS, more=st.integers(0, 20))
def test_zb_v_holds_what_1f1b_holds_at_most(p: int, more: int) -> None:
    # 2p half-rank chunks are p microbatches.
    assert count_in_flight(build_schedule("zb-v", p, 2 * p - 1 + more)) == (2 * p,) * p


@given(half=st.integers(1, 4), more=st.integers(1, 8))
def test_dualpipe_holds_one_microbatch_more_than_ranks(half: int, more: int) -> None:
    # DeepSeek-V3 report, table 2: p + 1.
    p = 2 * half
    assert count_in_flight(build_schedule("dualpipe", p, 2 * p + 2 * more)) == (p + 1,) * p


@given(p=st.integers(2, 6), more=st.integers(1, 8))
def test_dualpipe_v_holds_one_chunk_more_than_stages(p: int, more: int) -> None:
    assert count_in_flight(build_schedule("dualpipe-v", p, 2 * p + more)) == (2 * p + 1,) * p


@pytest.mark.parametrize("p", range(2, 10))
def test_v_half_and_v_min_hold_half_and_a_third(p: int) -> None:
    # Qi et al. 2024, arXiv 2405.15362: (p + 2) // 2 and (p + 4) // 3 microbatches of two chunks.
    for microbatches in ((p + 2) // 2, (p + 4) // 3):
        limit = 2 * microbatches
        if limit < 2 * p:
            assert (
                max(count_in_flight(build_schedule("zb-v", p, 4 * p, max_in_flight=limit))) <= limit
            )
