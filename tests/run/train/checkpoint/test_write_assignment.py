"""Who writes what: everything once, dealt evenly, and nothing left out unseen."""

from meshwright.policy.resharding.tensor_box import TensorBox
from meshwright.run.train.checkpoint.write_assignment import Claims, TensorClaim, assign_writes


def held(*rows: tuple[int, int], whole: int = 8, dtype: str = "F32") -> TensorClaim:
    boxes = tuple(TensorBox((first, 0), (last - first, 2)) for first, last in rows)
    return TensorClaim(dtype, (whole, 2), boxes)


def rows(ranks: list[Claims]) -> list[list[tuple[str, int, int]]]:
    dealt = assign_writes(ranks)
    assert dealt.problems == []
    return [
        sorted((box.tensor, box.offsets[0], box.offsets[0] + box.sizes[0]) for box in boxes)
        for boxes in dealt.boxes_by_rank
    ]


def test_what_one_rank_holds_it_writes() -> None:
    assert rows([{"w": held((0, 4))}, {"w": held((4, 8))}]) == [[("w", 0, 4)], [("w", 4, 8)]]


def test_what_several_hold_is_written_once_and_by_the_one_with_least_to_write() -> None:
    both = {name: held((0, 8)) for name in "abcd"}
    dealt = assign_writes([{**both, "own": held((0, 8))}, both])
    assert sorted(box.tensor for boxes in dealt.boxes_by_rank for box in boxes) == [*"abcd", "own"]
    assert [sum(box.size_bytes for box in boxes) for boxes in dealt.boxes_by_rank] in (
        [128, 192],
        [192, 128],
    )


def test_ranks_may_hold_different_tensors() -> None:
    assert rows([{"a": held((0, 8))}, {"b": held((0, 8))}]) == [[("a", 0, 8)], [("b", 0, 8)]]


def test_parts_that_overlap_are_cut() -> None:
    found = rows([{"w": held((0, 5))}, {"w": held((3, 8))}])
    assert found == [[("w", 0, 5)], [("w", 5, 8)]]


def test_what_nobody_holds_is_named() -> None:
    problems = assign_writes([{"w": held((0, 3)), "v": held((0, 8))}, {"w": held((4, 8))}]).problems
    assert [str(problem) for problem in problems] == [
        "w: 14 of its 16 elements are held by any rank (fix: place every part of it on some rank)"
    ]


def test_ranks_that_disagree_about_a_tensor_are_told() -> None:
    for other in (held((0, 8), whole=9), held((0, 8), dtype="BF16")):
        (problem,) = assign_writes([{"w": held((0, 8))}, {"w": other}]).problems
        assert problem.where == "w"
        assert "rank 1" in problem.what


def test_a_tensor_without_elements_is_written_by_one() -> None:
    nothing = TensorClaim("F32", (0, 4), ())
    dealt = assign_writes([{"w": nothing}, {"w": nothing}])
    assert sum(map(len, dealt.boxes_by_rank)) == 1
