from meshwright.observe.watch.step_signature import (
    OUTSIDE,
    StepSignature,
    build_signature,
    find_growth,
    find_unusual_change,
)
from tests.observe.analyze.traces import host, kernel, step, timeline

KNOWN = [StepSignature(100e6, {"gemm": 60e6 + 1e6 * number, "copy": 5e6}) for number in range(5)]


def test_operators_count_without_what_they_call() -> None:
    found = build_signature(
        [
            timeline(
                step(7, 0, 1000),
                host(100, 400, "aten::linear"),
                host(150, 350, "aten::addmm"),
                host(150, 350, "elsewhere", lane="thread 2"),
            )
        ]
    )
    assert found.step_ns == 1000
    assert found.ns_by_name == {"aten::linear": 100, "aten::addmm": 200, OUTSIDE: 700}


def test_kernels_and_idleness_count_where_there_is_a_device() -> None:
    found = build_signature([timeline(step(7, 0, 1000), kernel(100, 400), kernel(600, 800))])
    assert found.ns_by_name["gemm"] == 500
    assert sum(ns for name, ns in found.ns_by_name.items() if name.startswith("idle")) == 200


def test_what_changed_beyond_noise_is_told() -> None:
    found = find_unusual_change(StepSignature(120e6, {"gemm": 62e6, "copy": 25e6}), KNOWN)
    assert found is not None
    assert (found.name, found.before_ns, found.after_ns) == ("copy", 5e6, 25e6)


def test_what_varies_by_itself_is_no_difference() -> None:
    noisy = [StepSignature(100e6, {"gemm": 60e6 + 10e6 * (number % 3)}) for number in range(6)]
    assert find_unusual_change(StepSignature(100e6, {"gemm": 88e6}), noisy) is None
    assert find_unusual_change(StepSignature(100e6, {"gemm": 62e6, "copy": 9e6}), KNOWN) is None


def test_a_part_that_vanished_or_came_differs() -> None:
    assert find_unusual_change(StepSignature(40e6, {"copy": 5e6}), KNOWN) is not None
    assert (
        find_unusual_change(StepSignature(140e6, {"gemm": 62e6, "copy": 5e6, "sort": 9e6}), KNOWN)
        is not None
    )


def test_too_few_captures_say_nothing_about_what_is_usual() -> None:
    assert find_unusual_change(StepSignature(900e6, {"sort": 900e6}), KNOWN[:3]) is None


def test_greatest_growth_comes_first() -> None:
    before, after = (
        StepSignature(9, {"a": 1.0, "b": 2.0, "c": 5.0}),
        StepSignature(19, {"a": 3.0, "b": 12.0}),
    )
    assert [row.name for row in find_growth(before, after)] == ["b", "a"]
