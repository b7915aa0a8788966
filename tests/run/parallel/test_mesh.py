"""A mesh gives groups, each carried by the backend or by an algorithm of choice."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="runs gloo ranks")

import torch
import torch.distributed as dist

from meshwright.errors import InputError
from meshwright.run.parallel import mesh as mesh_module
from meshwright.run.parallel.group_coordinator import GroupCoordinator
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.run.parallel.mesh import Mesh, list_algorithm_problems
from meshwright.run.parallel.verify.dry_run import use_fake_process_group
from meshwright.spec.layout import Layout
from meshwright.spec.model import build_decoder_model
from tests.run.parallel.equivalence import Case, check
from tests.run.parallel.exchanges import wrong

DENSE = build_decoder_model("dense", layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61)
CHOICES = [
    {
        "all_reduce": "ring",
        "all_gather": "ring",
        "reduce_scatter": "ring",
        "all_to_all": "pairwise",
    },
    {
        "all_reduce": "double_tree",
        "all_gather": "bruck",
        "reduce_scatter": "pat",
        "all_to_all": "bruck",
    },
]


@pytest.mark.parametrize("choice", CHOICES)
def test_algorithms_of_choice_give_what_the_backend_gives(choice: dict[str, str]) -> None:
    assert spawn_ranks(4, wrong, {"tp": choice}) == [{}] * 4


@pytest.mark.slow
def test_a_model_trains_the_same_by_algorithms_of_choice() -> None:
    layout = Layout(tp=2, sequence_parallel=True, microbatch=2, precision="fp32")
    ways = {"tp": {"all_reduce": "ring", "all_gather": "direct", "reduce_scatter": "pat"}}
    found = check([Case("named", DENSE, layout, algorithms=ways)])
    assert found == {"named": []}


@pytest.mark.parametrize(
    ("algorithms", "said"),
    [
        ({"tb": {"all_reduce": "ring"}}, "algorithms.tb: the mesh has no such group .*tp, cp"),
        ({"tp": {"reduce": "ring"}}, "algorithms.tp.reduce: .*use all_reduce, all_gather"),
        ({"tp": {"all_reduce": "rinf"}}, "'rinf' is no all_reduce .*ring, chain, binary_tree"),
        ({"dp": {"all_to_all": "ring"}}, "'ring' is no all_to_all .*bruck, pairwise"),
        ({"tp": {"all_reduce": "two_level"}}, "'two_level' needs to be told of nodes"),
    ],
)
def test_unknown_choices_are_refused_before_any_group_forms(
    algorithms: dict[str, dict[str, str]], said: str
) -> None:
    # There is no process group here: a mesh of one rank needs none.
    with pytest.raises(InputError, match=said):
        Mesh(Layout(precision="fp32"), algorithms=algorithms)


def test_every_wrong_choice_is_reported_at_once() -> None:
    choice = {"tp": {"all_reduce": "x", "all_gather": "y"}, "zz": {}}
    found = list_algorithm_problems(Layout(tp=4, precision="fp32"), choice)
    assert {each.where for each in found} == {
        "algorithms.tp.all_reduce",
        "algorithms.tp.all_gather",
        "algorithms.zz",
    }


def test_a_layout_of_another_size_is_refused() -> None:
    with pytest.raises(InputError, match="the layout has 2 ranks, 1 were started"):
        Mesh(Layout(tp=2, precision="fp32"))


def test_no_group_forms_after_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    with use_fake_process_group(5, 8):
        mesh = Mesh(Layout(tp=8, precision="fp32"))
        monkeypatch.setattr(dist, "new_group", None)  # not to be called any more
        assert mesh.get_subgroup("tp", 2).ranks == (4, 5)
        assert mesh.get_subgroup("tp", 4).ranks == (4, 5, 6, 7)


def test_mirrored_stages_share_torchs_group_with_nobody() -> None:
    with use_fake_process_group(0, 2):
        mesh = Mesh(Layout(pp=2, schedule="dualpipe", precision="fp32"))
        mirror = mesh["mirror"].process_group
        assert mirror is not mesh.world.process_group
        assert mirror is not mesh["pp"].process_group


def test_all_ranks_connect_their_groups_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(GroupCoordinator, "warm_up", lambda group, _: seen.append(group.name))
    with use_fake_process_group(0, 8):
        mesh = Mesh(Layout(tp=2, dp=2, pp=2, precision="fp32"))
        used = [mesh[axes] for axes in ("tp", "pp", "dp", "dp-cp", "ep", "tp-cp-dp-pp")]
        for given in (used, used[::-1]):
            seen.clear()
            mesh.connect_groups(given)
            # Replicas are one group by two names; experts are on one rank.
            assert seen == ["tp", "dp", "pp", "tp-cp-dp-pp"]


def connected() -> dict[str, int]:
    mesh = Mesh(Layout(dp=3, precision="fp32"))
    mesh.connect_groups([mesh.world])
    assert not mesh.flight_recorder.records, "gloo has connected its ranks"
    mesh.world.connect(torch.device("cpu"))
    return {name: count for name, count in mesh.flight_recorder.counts.items() if count}


def test_members_of_a_group_are_connected_with_all_and_with_the_next() -> None:
    for rank, found in enumerate(spawn_ranks(3, connected)):
        after, before = (rank + 1) % 3, (rank - 1) % 3
        pairs = [(rank, after), (after, rank), (before, rank), (rank, before)]
        world = "tp-cp-dp-pp"
        assert found == {world: 1} | {f"{world} {one}>{other}": 1 for one, other in pairs}


def test_a_mesh_ends_what_its_algorithms_began(monkeypatch: pytest.MonkeyPatch) -> None:
    class Quiet:
        """A team that says when it is closed."""

        def __init__(self, handle: Any, **_: Any) -> None:
            self.handle = handle

        def close(self) -> None:
            closed.append(self.handle)

    closed: list[Any] = []
    monkeypatch.setattr(mesh_module, "RankCommunicator", Quiet)
    with use_fake_process_group(0, 4):
        ways = {"tp": {"all_reduce": "ring"}, "dp": {"all_reduce": "ring"}}
        mesh = Mesh(Layout(tp=2, dp=2, precision="fp32"), algorithms=ways)
        mesh.close()
        mesh.close()
        assert closed == [mesh["tp"].process_group, mesh["dp"].process_group]
