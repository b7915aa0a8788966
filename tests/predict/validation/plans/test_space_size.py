"""The size of a space is the number of its layouts, as listing them one by one finds it."""

from random import Random

import pytest
from msgspec.structs import replace

from meshwright.predict.plan import LayoutSpace, PlanQuestion
from meshwright.predict.plan.space.recompute_options import list_recompute_choices
from meshwright.predict.validation.plans.space_size import count_layouts
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.layout.choices import AXES
from meshwright.spec.workload import TrainingWorkload
from tests.predict.plan.exhaustive import Every
from tests.predict.plan.small import question_of
from tests.predict.plan.tiny import SPARSE, asked

ONE = (
    "tp=1", "cp=1", "pp=1", "microbatch=1", "recompute=none", "zero=0", "offload=none",
    "overlap_gradients=on",
)  # fmt: skip


def told_apart(question: PlanQuestion, layout: Layout) -> tuple[object, ...]:
    """Return what makes a layout another one than its like: nothing that has no effect."""
    experts = question.model.moe is not None
    active = {axis for axis in AXES if getattr(layout, axis) > 1}
    active |= {"tp", "dp"} if experts else set()
    order: object = layout.order
    if "order" not in question.space.fixed:
        order = [axis for axis in layout.order.split("-") if axis in active]
    shared = layout.dp * layout.cp > 1
    degrees = (layout.tp, layout.cp, layout.pp, layout.dp, layout.ep, layout.expert_tp)
    return (
        *degrees, layout.microbatch, layout.precision, str(order), layout.sequence_parallel,
        layout.cp_kind, layout.schedule, layout.virtual_stages, layout.stage_layers,
        layout.recompute, frozenset(layout.recompute_ops), layout.recompute_layers,
        layout.zero, layout.shard,
        shared and layout.overlap_gradients,
        shared and layout.zero > 0 and layout.overlap_parameters,
        layout.sequence_parallel and layout.overlap_tp,
        layout.pp > 1 and layout.overlap_pp,
        layout.ep > 1 and layout.overlap_ep,
    )  # fmt: skip


def listed(question: PlanQuestion) -> int:
    """Count the layouts of a question one by one."""
    every = Every(question)
    sets = {(one.recompute, frozenset(one.ops)) for one in list_recompute_choices(question)}
    return len(
        {
            told_apart(question, one)
            for one in every.layouts()
            # The enumerator lists sets as well of which one operation is part of another.
            if (one.recompute, frozenset(one.recompute_ops)) in sets and every.sound(one)
        }
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_size_is_that_of_listing_every_layout(seed: int) -> None:
    question = question_of(Random(seed), 1000)
    assert count_layouts(question) == listed(question)


def test_memory_does_not_change_the_size() -> None:
    assert count_layouts(asked(memory_gb=1)) == count_layouts(asked())


def test_one_layout_is_left_where_everything_is_fixed() -> None:
    assert count_layouts(asked(fixed=ONE)) == 1


def test_a_value_that_does_not_divide_leaves_none() -> None:
    assert count_layouts(asked(fixed=("tp=3",))) == 0


def test_recompute_counts_once_for_each_number_of_layers() -> None:
    fixed = (*(text for text in ONE if "recompute" not in text), "recompute=full")
    assert count_layouts(asked(fixed=fixed)) == 4


def test_offload_of_activations_counts_once_for_each_number_of_layers() -> None:
    fixed = (*(text for text in ONE if "offload" not in text), "offload=none,optimizer,activations")
    assert count_layouts(asked(fixed=fixed)) == 1 + 1 + 4


def test_orders_that_move_only_axes_of_one_rank_are_one() -> None:
    fixed = ("pp=2", "dp=4", "microbatch=1", "recompute=none", "zero=0", "offload=none",
             "schedule=1f1b", "stage_layers=none", "overlap_gradients=on",
             "overlap_pp=on")  # fmt: skip
    assert count_layouts(asked(fixed=fixed)) == 2


def test_a_switch_with_nothing_to_overlap_does_not_count() -> None:
    question = asked(fixed=tuple(text for text in ONE if "overlap" not in text))
    assert count_layouts(question) == 2  # gradients alone: no shards, sends or experts
    fixed = {**question.space.fixed, "zero": (1,), "shard": (None,)}
    assert count_layouts(replace(question, space=LayoutSpace(fixed=fixed))) == 4  # and parameters


def test_experts_lie_in_the_stage_of_their_rank() -> None:
    fixed = ("tp=2", "pp=2", "dp=2", "ep=2", "expert_tp=1", "microbatch=1", "recompute=none",
             "zero=0", "offload=none", "schedule=1f1b", "stage_layers=none",
             "sequence_parallel=off", "overlap_gradients=on", "overlap_pp=on",
             "overlap_ep=on")  # fmt: skip
    question = asked(model=SPARSE, fixed=fixed)
    assert count_layouts(question) == listed(question) < 24


def test_the_largest_spaces_are_counted() -> None:
    question = PlanQuestion(
        model=catalog.get_model("llama3.1-405b"),
        cluster=catalog.get_cluster("h100-superpod").with_gpus(16384),
        workload=TrainingWorkload(tokens=10**12, sequence_length=8192, global_batch=2048),
    )
    assert count_layouts(question) > 10**11
