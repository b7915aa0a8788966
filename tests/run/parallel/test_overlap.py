"""What is exchanged is issued before the computation that hides it, and waited for after.

One machine without GPUs cannot show that time is saved. What it can show is the order: an exchange
that is on its way while something computes is free to run beside it. Each test has its control: the
same step with that overlap switched off, where nothing computes while anything is on its way.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch", reason="trains on gloo ranks")

import torch

from meshwright.policy.pipeline.schedule import PipelineAction
from meshwright.run.nn.linear.linear import Linear
from meshwright.run.parallel.context_parallel import partial_attention
from meshwright.run.parallel.forward_backward import (
    ForwardBackwardRunner,
    make_step_schedule,
)
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.pipeline_parallel.pipeline_stage import StageExecutor
from meshwright.run.parallel.sharded_model import shard_model
from meshwright.run.parallel.tensor_parallel import tp_overlap
from meshwright.run.parallel.timeline_recorder import TimelineRecorder
from meshwright.run.parallel.zero.gradient_sync import make_gradient_sync
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model, MoESpec, build_decoder_model
from meshwright.timeline import SpanKind, read_timeline
from tests.run.parallel.equivalence import cut, sequences
from tests.run.parallel.issue_order import (
    Event,
    Exchange,
    IssueOrder,
    exchanges,
    waiting_at_once,
)

LAYERS = 4
SHAPE: dict[str, Any] = {"layers": LAYERS, "hidden": 32, "heads": 4, "ffn": 48, "vocab": 61}
DENSE = build_decoder_model("dense", **SHAPE)
ROUTED = build_decoder_model(
    "routed", **SHAPE, experts=MoESpec(count=4, top_k=2, width=16, shared_width=16)
)
BUCKET_BYTES = 8 << 10
"""About a matrix: every layer fills several."""
MICROBATCHES = 4
"""Of a pipeline; others have two."""
STEPS = 2
"""The first step learns which gradients come; the second is looked at."""

UPDATED = Event("end", "update")
"""Between the steps; weights that are gathered at its end belong to the next one."""

Found = dict[str, list[Event]]


def layout(**given: Any) -> Layout:
    return Layout(**{"microbatch": 2, "precision": "fp32", **given})


Watch = Callable[[IssueOrder], AbstractContextManager[None]]


def marks(
    model: Model, asked: Layout, *, watch: Watch | None = None, folder: Path | None = None
) -> list[Event]:
    """Return what a rank issues, waits for and computes in two steps without an update.

    `watch` marks more than layers and linear products; `folder` takes a timeline.
    """
    mesh = Mesh(asked)
    mesh.recorder = None if folder is None else TimelineRecorder(folder, mesh.rank)
    order = IssueOrder(mesh.flight_recorder)
    mine = shard_model(model, mesh, dtype=torch.float32, seed=1)
    watched = {f"layers.{key}": each for key, each in mine.decoder.layers.named_children()}
    watched |= {
        name: each
        for name, each in mine.decoder.named_modules()
        if isinstance(each, Linear) or name.endswith("mlp.shared")
    }
    for name, module in watched.items():
        order.watch_backward(name, module)
    sync, runner = make_gradient_sync(mine, bucket_bytes=BUCKET_BYTES), ForwardBackwardRunner(mine)
    for name, module in watched.items():
        order.watch_forward(name, module)
    count = 2 * (MICROBATCHES if asked.pp > 1 else 2)
    each = count // asked.dp
    with nullcontext() if watch is None else watch(order):
        for step in range(STEPS):
            batch = sequences(model.vocab, count, step, packed=False)
            first = mesh.coordinate.dp * each
            given = [cut(batch, first + at, 2) for at in range(0, each, 2)]
            sync.begin_step()
            runner(given, 1 / 128, sync.mark_last_backward)
            sync.reduced_gradients()
            sync.zero_grads_and_unshard()
            if step < STEPS - 1:
                order.events.append(UPDATED)
    if mesh.recorder is not None:
        mesh.recorder.close()
    return order.events


@contextmanager
def attending(order: IssueOrder) -> Iterator[None]:
    """Mark the blocks of attention."""
    there = order.around(partial_attention.partial_attention_forward, "attend")
    back = order.around(partial_attention.partial_attention_backward, "attend backward")
    with patch.multiple(
        partial_attention, partial_attention_forward=there, partial_attention_backward=back
    ):
        yield


@contextmanager
def multiplying(order: IssueOrder) -> Iterator[None]:
    """Mark the pieces of products."""
    names = ("forward", "to_input", "to_weight")
    job: Any = tp_overlap._Job
    changed: dict[str, Any] = {name: order.around(getattr(job, name), "piece") for name in names}
    with patch.multiple(job, **changed):
        yield


@contextmanager
def passing(order: IssueOrder) -> Iterator[None]:
    """Mark the passes of a pipeline by what they are and their microbatch."""

    def marked(call: Callable[..., Any], word: str) -> Callable[..., Any]:
        def run(passes: StageExecutor, at: tuple[int, int], *given: Any, **named: Any) -> Any:
            return order.around(call, f"{word} {at[0]} {at[1]}")(passes, at, *given, **named)

        return run

    names = {
        "forward_one_chunk": "F",
        "backward_one_chunk": "B",
        "backward_weight_one_chunk": "W",
    }
    changed: dict[str, Any] = {
        name: marked(getattr(StageExecutor, name), word) for name, word in names.items()
    }
    with patch.multiple(StageExecutor, **changed):
        yield


PIPES = {"1f1b": 1, "zb-h1": 1, "interleaved": 2}


def on_two_ranks() -> Found:
    found: Found = {}
    for zero in range(4):
        found[f"zero {zero}"] = marks(DENSE, layout(dp=2, zero=zero))
        off = layout(dp=2, zero=zero, overlap_gradients=False, overlap_parameters=False)
        found[f"zero {zero} off"] = marks(DENSE, off)
    for name, switch in (("experts", True), ("experts off", False)):
        found[name] = marks(ROUTED, layout(dp=2, ep=2, overlap_ep=switch))
    for name, chunks in PIPES.items():
        for word, switch in (("", True), (" off", False)):
            asked = layout(pp=2, schedule=name, virtual_stages=chunks, overlap_pp=switch)
            found[name + word] = marks(DENSE, asked, watch=passing)
    return found


def on_four_ranks() -> Found:
    ring = partial(marks, DENSE, layout(cp=4, cp_kind="ring"), watch=attending)
    found = {"ring": ring()}
    with waiting_at_once():
        found["ring off"] = ring()
    for name, switch in (("products", True), ("products off", False)):
        asked = layout(tp=4, sequence_parallel=True, overlap_tp=switch)
        found[name] = marks(DENSE, asked, watch=multiplying)
    return found


@pytest.fixture(scope="module")
def two() -> list[Found]:
    found: list[Found] = spawn_ranks(2, on_two_ranks)
    return found


@pytest.fixture(scope="module")
def four() -> list[Found]:
    found: list[Found] = spawn_ranks(4, on_four_ranks)
    return found


def carried(events: list[Event], *words: str) -> list[Exchange]:
    """Return a rank's exchanges whose names begin so, in the last step."""
    since = events.index(UPDATED)
    return [
        each for each in exchanges(events) if each.issued > since and each.what.startswith(words)
    ]


def prepared(events: list[Event], *words: str) -> list[Exchange]:
    """Return those that the end of the first step began, for the next one."""
    last = max(place for place, event in enumerate(events) if event.what == "backward layers.0")
    first = min(place for place, event in enumerate(events) if event.what == "backward layers.0")
    assert first < last
    return [
        each
        for each in exchanges(events)
        if first < each.issued < events.index(UPDATED) and each.what.startswith(words)
    ]


def hiding(found: list[Exchange]) -> set[str]:
    """Return all that runs from beginning to end while some exchange is on its way."""
    return {what for each in found for what in each.behind}


def alone(events: list[Event], *words: str) -> int:
    """Count such exchanges of the last step, none of which anything begins beside."""
    found = carried(events, *words)
    assert [each for each in found if each.begun] == []
    return len(found)


def layers(word: str, numbers: Iterable[int] = range(LAYERS)) -> set[str]:
    return {f"{word} layers.{number}" for number in numbers}


def last(events: list[Event], kind: str, what: str) -> int:
    """Return the last place of a mark."""
    return max(at for at, event in enumerate(events) if event[:2] == (kind, what))


REDUCTIONS = ("all_reduce sum of dp-cp", "reduce_scatter of shard")
GATHERS = "all_gather of shard"


@pytest.mark.parametrize("zero", range(4))
def test_gradients_are_on_their_way_while_earlier_ones_are_computed(
    two: list[Found], zero: int
) -> None:
    for rank in two:
        events = rank[f"zero {zero}"]
        # From the last layer's to the first's: there is always more to compute.
        since, until = (last(events, "begin", f"backward layers.{n}") for n in (LAYERS - 1, 0))
        found = [each for each in carried(events, *REDUCTIONS) if since < each.issued < until]
        assert len(found) >= LAYERS - 1
        assert all(any(what.startswith("backward") for what in each.begun) for each in found)


@pytest.mark.parametrize("zero", range(4))
def test_without_overlap_nothing_is_computed_while_gradients_are_on_their_way(
    two: list[Found], zero: int
) -> None:
    for rank in two:
        assert alone(rank[f"zero {zero} off"], *REDUCTIONS) > LAYERS


@pytest.mark.parametrize("zero", [0, 1])
def test_a_layer_s_gradients_leave_before_the_layer_before_it_and_are_waited_for_after_all(
    two: list[Found], zero: int
) -> None:
    for rank in two:
        events = rank[f"zero {zero}"]
        found, end = carried(events, *REDUCTIONS), last(events, "end", "backward layers.0")
        for number in range(1, LAYERS):
            own = last(events, "begin", f"backward layers.{number}")
            before = last(events, "begin", f"backward layers.{number - 1}")
            assert any(own < each.issued < before and each.waited > end for each in found)


def test_a_layer_s_gradients_leave_in_several_buckets_while_it_still_runs(
    two: list[Found],
) -> None:
    for rank in two:
        events = rank["zero 0"]
        for number in range(LAYERS):
            own = (last(events, kind, f"backward layers.{number}") for kind in ("begin", "end"))
            since, until = own
            issued = [each.issued for each in carried(events, *REDUCTIONS)]
            assert any(since < place < until - 1 for place in issued)


def test_zero_3_gathers_the_next_layer_while_one_runs_and_no_more(two: list[Found]) -> None:
    # The last layer hides the head's gathering, and stays until its own backward pass.
    wanted = layers("forward") | layers("backward", range(1, LAYERS))
    for rank in two:
        found = carried(rank["zero 3"], GATHERS)
        assert hiding(found) & (layers("forward") | layers("backward")) == wanted
        assert all(len(wanted.intersection(each.behind)) <= 1 for each in found)
        assert alone(rank["zero 3 off"], GATHERS) == len(found)


@pytest.mark.parametrize("zero", [1, 2])
def test_updated_weights_are_on_their_way_until_their_layer_runs(
    two: list[Found], zero: int
) -> None:
    for rank in two:
        found = prepared(rank[f"zero {zero}"], GATHERS)
        assert hiding(found) & layers("forward") == layers("forward", range(LAYERS - 1))
        waited = prepared(rank[f"zero {zero} off"], GATHERS)
        assert len(waited) == len(found) > LAYERS
        assert [each for each in waited if each.begun] == []


def test_shared_experts_run_while_tokens_travel_to_the_others(two: list[Found]) -> None:
    shared = {f"{word} layers.{n}.mlp.shared" for word in WORDS for n in range(LAYERS)}
    for rank in two:
        found = carried(rank["experts"], "all_to_all of ep")
        assert hiding(found) >= shared
        # There and back, forward and backward: one of two is hidden, as the results' way back is
        # followed by nothing that does not need them.
        assert [bool(each.behind) for each in found].count(True) * 2 == len(found)
        assert alone(rank["experts off"], "all_to_all of ep") == len(found)


WORDS = ("forward", "backward")
PASSES = {"F": "F", "B": "B", "I": "B", "W": "W"}


def between(lane: Sequence[PipelineAction]) -> list[tuple[str, ...]]:
    """Return for each receive of a lane the passes from where it stands to its use."""
    found = []
    for place, action in enumerate(lane):
        if action.op.startswith("recv"):
            uses = ("F",) if action.op == "recv_forward" else ("B", "I")
            rest = lane[place:]
            (until,) = [
                at for at, each in enumerate(rest) if each.op in uses and each[1:3] == action[1:3]
            ]
            passes = [each for each in rest[:until] if each.op in PASSES]
            found.append(tuple(f"{PASSES[op]} {chunk} {at}" for op, chunk, at, _ in passes))
    return found


@pytest.mark.parametrize("name", PIPES)
def test_receives_are_posted_where_the_schedule_has_them_and_waited_for_at_their_use(
    two: list[Found], name: str
) -> None:
    hidden = 0
    for number, rank in enumerate(two):
        found = carried(rank[name], f"message of pp {1 - number}>")
        asked = layout(pp=2, schedule=name, virtual_stages=PIPES[name])
        lane = make_step_schedule(asked, MICROBATCHES).actions[number]
        passes = [
            tuple(what for what in each.behind if what[0] in PASSES.values()) for each in found
        ]
        assert passes == between(lane)
        hidden += sum(map(bool, passes))
        assert alone(rank[f"{name} off"], f"message of pp {1 - number}>") == len(found)
    assert hidden


@pytest.mark.parametrize("name", PIPES)
def test_what_is_sent_leaves_while_the_next_pass_runs(two: list[Found], name: str) -> None:
    for number, rank in enumerate(two):
        found = carried(rank[name], f"message of pp {number}>")
        # Nothing follows the last gradient that the last stage sends.
        assert all(each.behind for each in found[: -1 if number else None])
        assert alone(rank[f"{name} off"], f"message of pp {number}>") == len(found)


def test_keys_and_values_go_round_while_those_at_hand_are_attended_to(four: list[Found]) -> None:
    attentions = LAYERS * 2
    for rank in four:
        found = carried(rank["ring"], "message of cp")
        assert {each.behind for each in found} == {("attend",), ("attend backward",), ()}
        # Each goes to one rank and comes from another; the last trip of gradients is the way home.
        assert [each.behind for each in found].count(()) == 2 * attentions
        assert [each.behind for each in found].count(("attend",)) == 2 * 3 * attentions
        assert [each.behind for each in found].count(("attend backward",)) == 2 * 6 * attentions
        assert alone(rank["ring off"], "message of cp") == len(found)


def test_products_in_pieces_multiply_one_while_the_next_is_on_its_way(four: list[Found]) -> None:
    for rank in four:
        found = carried(rank["products"], "message of tp")
        assert len(found) > 100
        assert all(each.behind and set(each.behind) == {"piece"} for each in found)
        assert carried(rank["products off"], "message") == []
        assert alone(rank["products off"], "all_gather of tp", "reduce_scatter of tp")


def record(folder: Path) -> None:
    for name, switch in (("on", True), ("off", False)):
        marks(DENSE, layout(dp=2, overlap_gradients=switch), folder=folder / name)


def test_the_timeline_of_a_run_shows_exchanges_beside_computation(tmp_path: Path) -> None:
    spawn_ranks(2, record, tmp_path)
    for name, seen in (("on", True), ("off", False)):
        for timeline in read_timeline(tmp_path / name).split_by_rank():
            spans = timeline.spans.to_pylist()
            computed = [each for each in spans if each["name"] in layers("backward")]
            carried_out = [
                each
                for each in spans
                if each["kind"] == SpanKind.COMMUNICATION.value and "all_reduce" in each["name"]
            ]
            assert computed
            assert carried_out
            assert any(_covers(*both) for both in product(carried_out, computed)) is seen


def _covers(one: dict[str, int], other: dict[str, int]) -> bool:
    """Say whether one span begins before another and ends after it."""
    ends = [each["start_ns"] + each["duration_ns"] for each in (one, other)]
    return one["start_ns"] <= other["start_ns"] and ends[0] >= ends[1]
