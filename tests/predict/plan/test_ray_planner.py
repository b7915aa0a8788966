"""The search on a Ray cluster gives the answer of the search in this process."""

import builtins
import os
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from meshwright.errors import InputError, MissingDependency
from meshwright.predict.plan import LayoutSpace, PlanQuestion, find_plans, ray_planner
from meshwright.predict.plan.ray_planner import (
    SearchPart,
    SharedBestActor,
    find_plans_with_ray,
    select_fastest,
    split_work,
)
from meshwright.predict.plan.search.branch_and_bound import PlanCandidate, PlanProgress, PlanSearch
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.workload import TrainingWorkload


def question(**fixed: tuple[Any, ...]) -> PlanQuestion:
    return PlanQuestion(
        model=catalog.get_model("llama3.1-8b"),
        cluster=catalog.get_cluster("h100-superpod").with_gpus(32),
        workload=TrainingWorkload(tokens=10**9, sequence_length=8192, global_batch=64),
        space=LayoutSpace(fixed={"microbatch": (1, 2), "cp": (1, 2), **fixed}),
    )


def narrow(wide: PlanQuestion) -> PlanQuestion:
    """Return the same question with few layouts."""
    fixed = {"tp": (4,), "pp": (16,), "cp": (1,), "ep": (64,), "expert_tp": (1,)}
    more = {"microbatch": (1,), "schedule": ("1f1b",), "zero": (1,), "recompute": ("full",)}
    return replace(wide, space=LayoutSpace(fixed={**fixed, **more, "order": ("tp-cp-ep-dp-pp",)}))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A real Ray cluster on this machine with two workers."""
    ray = pytest.importorskip("ray", reason="needs Ray: pip install 'meshwright[ray]'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=100 * 2**20,
    )
    yield ray
    ray.shutdown()


@pytest.mark.real
@pytest.mark.usefixtures("cluster")
@pytest.mark.filterwarnings("ignore::FutureWarning")
class TestOnARealCluster:
    def test_the_answer_is_that_of_one_process(self) -> None:
        alone = find_plans(question(), most=3, execute=False)
        spread = find_plans_with_ray(question(), most=3, parts=3, execute=False)
        assert spread.is_proved
        steps = [plan.step.step_s for plan in spread.plans]
        assert steps == [plan.step.step_s for plan in alone.plans]
        assert spread.best.layout == alone.best.layout
        assert spread.bound_s == alone.bound_s
        assert spread.gap == 0

    def test_a_cluster_that_was_there_before_stays(self, cluster: Any) -> None:
        find_plans_with_ray(question(tp=(8,), pp=(1,)), most=1, execute=False)
        assert cluster.is_initialized()

    def test_ctrl_c_returns_the_best_so_far(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hands: list[SearchPart] = []

        def shown(asked: PlanQuestion, parts: int) -> list[SearchPart]:
            hands.extend(split_work(asked, parts))
            return hands

        def interrupted(progress: PlanProgress) -> None:
            if hands:  # the quick search before the tasks is over
                assert progress.bound_s <= (progress.best_step_s or float("inf"))
                raise KeyboardInterrupt

        monkeypatch.setattr(ray_planner, "restrict_to_common_layouts", narrow)
        monkeypatch.setattr(ray_planner, "split_work", shown)
        wide = PlanQuestion(
            model=catalog.get_model("deepseek-v3"),
            cluster=catalog.get_cluster("h100-superpod").with_gpus(1024),
            workload=TrainingWorkload(tokens=10**9, sequence_length=4096, global_batch=8192),
        )
        answer = find_plans_with_ray(wide, most=1, report=interrupted, execute=False)
        assert hands
        assert not answer.is_proved
        assert min(hand.bound_s for hand in hands) <= answer.bound_s
        assert answer.bound_s <= answer.best.step.step_s

    def test_where_nothing_fits_it_says_so(self) -> None:
        with pytest.raises(InputError):
            find_plans_with_ray(question(tp=(1,), pp=(1,), zero=(0,)), execute=False)


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = builtins.__import__

    def without_ray(name: str, *args: Any, **more: Any) -> Any:
        if name == "ray":
            raise ModuleNotFoundError(name)
        return usual(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    with pytest.raises(MissingDependency, match="Ray") as error:
        find_plans_with_ray(question())
    assert error.value.hint == "pip install 'meshwright[ray]'"


def test_every_split_is_dealt_out_once() -> None:
    asked = question()
    hands = split_work(asked, 5)
    cores = [core for hand in hands for core in hand.splits]
    assert len(hands) == 5
    assert sorted(cores) == sorted(PlanSearch(asked).degree_splits.list_splits())
    assert max(len(hand.splits) for hand in hands) - min(len(hand.splits) for hand in hands) <= 1


def test_there_are_no_more_hands_than_splits() -> None:
    asked = question(tp=(8,), pp=(1,), cp=(1,))
    assert (
        len(split_work(asked, 100)) == len(list(PlanSearch(asked).degree_splits.list_splits())) == 2
    )


def _found(asked: PlanQuestion) -> list[PlanCandidate]:
    search = PlanSearch(asked, max_plans=4)
    search.run()
    return search.best


def test_a_board_keeps_the_fastest_of_each_family_and_the_least_bound() -> None:
    best = _found(question(tp=(4, 8), pp=(1, 2)))
    board = SharedBestActor(2, best[1:], [1.0, 2.0])
    assert board.get_state().progress.bound_s == 1.0
    assert board.report(0, best[:1], PlanProgress(None, float("inf"), 7, 0)) == best[:2]
    state = board.get_state()
    assert state.best == best[:2]
    assert state.progress.expanded_nodes == 7
    # The part that is left promises 2 s, but what is found takes less.
    assert state.progress.bound_s == min(2.0, best[0].step.step_s)


def test_the_slower_of_one_family_is_dropped() -> None:
    one = _found(question(tp=(8,), pp=(1,)))[0]
    slow = PlanCandidate(one.layout, one.step)
    other = PlanCandidate(Layout(tp=2), one.step)
    assert select_fastest([slow, one, other], 5) == [slow, other]
