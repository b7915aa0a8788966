"""Who writes what: everything once, dealt evenly, and nothing left out unseen."""

from meshwright.policy.boxes import Extent
from meshwright.run.train.checkpoint.dealing import Claim, Claims, deal_out


def held(*rows: tuple[int, int], whole: int = 8, dtype: str = "F32") -> Claim:
    boxes = tuple(Extent((first, 0), (last - first, 2)) for first, last in rows)
    return Claim(dtype, (whole, 2), boxes)


def rows(ranks: list[Claims]) -> list[list[tuple[str, int, int]]]:
    dealt = deal_out(ranks)
    assert dealt.problems == []
    return [
        sorted((box.tensor, box.offsets[0], box.offsets[0] + box.sizes[0]) for box in boxes)
        for boxes in dealt.boxes
    ]


def test_what_one_rank_holds_it_writes() -> None:
    assert rows([{"w": held((0, 4))}, {"w": held((4, 8))}]) == [[("w", 0, 4)], [("w", 4, 8)]]


def test_what_several_hold_is_written_once_and_by_the_one_with_least_to_write() -> None:
    both = {name: held((0, 8)) for name in "abcd"}
    dealt = deal_out([{**both, "own": held((0, 8))}, both])
    assert sorted(box.tensor for boxes in dealt.boxes for box in boxes) == [*"abcd", "own"]
    assert [sum(box.bytes for box in boxes) for boxes in dealt.boxes] in ([128, 192], [192, 128])


def test_ranks_may_hold_different_tensors() -> None:
    assert rows([{"a": held((0, 8))}, {"b": held((0, 8))}]) == [[("a", 0, 8)], [("b", 0, 8)]]


def test_parts_that_overlap_are_cut() -> None:
    found = rows([{"w": held((0, 5))}, {"w": held((3, 8))}])
    assert found == [[("w", 0, 5)], [("w", 5, 8)]]


def test_what_nobody_holds_is_named() -> None:
    problems = deal_out([{"w": held((0, 3)), "v": held((0, 8))}, {"w": held((4, 8))}]).problems
    assert [str(problem) for problem in problems] == [
        "w: 14 of its 16 elements are held by any rank (fix: place every part of it on some rank)"
    ]


def test_ranks_that_disagree_about_a_tensor_are_told() -> None:
    for other in (held((0, 8), whole=9), held((0, 8), dtype="BF16")):
        (problem,) = deal_out([{"w": held((0, 8))}, {"w": other}]).problems
        assert problem.where == "w"
        assert "rank 1" in problem.what


def test_a_tensor_without_elements_is_written_by_one() -> None:
    nothing = Claim("F32", (0, 4), ())
    dealt = deal_out([{"w": nothing}, {"w": nothing}])
    assert sum(map(len, dealt.boxes)) == 1
