"""A mesh gives groups, each carried by the backend or by an algorithm of choice."""

import pytest

pytest.importorskip("torch", reason="runs gloo ranks")

from meshwright.errors import InputError
from meshwright.run.parallel.collective.launch import launch
from meshwright.run.parallel.mesh import Mesh, algorithm_problems
from meshwright.spec.layout import Layout
from meshwright.spec.model import decoder
from tests.run.parallel.equivalence import Case, check
from tests.run.parallel.exchanges import wrong

DENSE = decoder("dense", layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61)
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
    assert launch(4, wrong, {"tp": choice}) == [{}] * 4


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
    found = algorithm_problems(Layout(tp=4, precision="fp32"), choice)
    assert {each.where for each in found} == {
        "algorithms.tp.all_reduce",
        "algorithms.tp.all_gather",
        "algorithms.zz",
    }


def test_a_layout_of_another_size_is_refused() -> None:
    with pytest.raises(InputError, match="the layout has 2 ranks, 1 were started"):
        Mesh(Layout(tp=2, precision="fp32"))
