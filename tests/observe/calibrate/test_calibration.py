"""A device whose constants are known is measured, and they come back."""

from math import log, log2

import msgspec
import pytest

from meshwright.errors import InputError
from meshwright.observe.bench.bench_case import BenchCase, BenchRow
from meshwright.observe.bench.suite import BenchResult
from meshwright.observe.calibrate.calibration import calibrate
from meshwright.observe.calibrate.curve_fit import fit_curve
from meshwright.observe.calibrate.fit_targets import list_fit_targets
from meshwright.observe.calibrate.measured_device import PEAK_HEADROOM
from meshwright.observe.hardware.machine import Machine
from meshwright.predict.cost import GemmCurve, build_device_costs, linear_s, memory_s
from tests.observe.calibrate.synthetic import (
    ATTENTION,
    GPU,
    MACHINE,
    PRODUCT,
    bench,
    forward_attention,
    measured,
    product_cases,
    row_of,
    unloaded,
)


def wavy(case: BenchCase) -> float:
    """Return what no curve has: some shapes take up to a fifth longer or shorter."""
    return 0.2 * float((log2(case.size("n")) - 12) / 3 * (log2(case.size("k")) - 12) / 3)


def test_every_constant_of_a_device_without_noise_comes_back() -> None:
    (curve,) = calibrate(bench(*measured(product_cases(60)))).calibration.products
    for name in ("efficiency", "bandwidth", "launch_s", "fill_k", "tail", "gradient_ratio"):
        assert getattr(curve, name) == pytest.approx(getattr(PRODUCT, name), rel=0.01), name


def test_weight_gradients_have_a_pace_of_their_own_only_where_rows_show_it() -> None:
    def slow_weights(case: BenchCase) -> float:
        # Work of the device alone: what starting takes does not change.
        return log(1 / 0.75) if case.name == "weight_gradient" else 0.0

    large = [case for case in product_cases(60) if case.size("m") * case.size("n") > 1 << 24]
    for extra, ratio in ((slow_weights, 0.75), (lambda _: 0.0, 1.0)):
        (subject,) = list_fit_targets(measured(large, noise=0.01, extra=extra), GPU)
        curve = fit_curve(subject, GPU).curve
        assert isinstance(curve, GemmCurve)
        assert curve.weight_ratio == pytest.approx(ratio, rel=0.05)
        assert (curve.weight_ratio == 1.0) == (ratio == 1.0)


def test_noise_moves_only_constants_that_hardly_matter() -> None:
    # Products of this size hardly move at the pace of memory: the bandwidth is left out.
    (curve,) = calibrate(bench(*measured(product_cases(90), noise=0.02))).calibration.products
    assert curve.efficiency == pytest.approx(PRODUCT.efficiency, rel=0.03)
    assert curve.gradient_ratio == pytest.approx(PRODUCT.gradient_ratio, rel=0.03)
    assert curve.fill_k == pytest.approx(PRODUCT.fill_k, rel=0.2)
    assert curve.launch_s == pytest.approx(PRODUCT.launch_s, rel=0.2)


def test_attention_comes_back() -> None:
    found = calibrate(bench(*measured(forward_attention(), noise=0.01)))
    (curve,) = found.calibration.attention
    assert curve.part == "forward"
    assert curve.efficiency == pytest.approx(ATTENTION.efficiency, rel=0.05)
    assert curve.softmax_dims == pytest.approx(ATTENTION.softmax_dims, rel=0.25)


@pytest.mark.slow
def test_errors_on_rows_left_out_are_those_of_the_noise() -> None:
    report = calibrate(bench(*measured(product_cases(90), noise=0.02))).reports[0]
    assert report.cross_validated is not None
    assert 0.008 < report.cross_validated.median < 0.025
    assert abs(report.cross_validated.bias) < 0.01
    assert set(report.by_part) == {"forward", "input_gradient", "weight_gradient"}


@pytest.mark.slow
def test_a_few_wild_rows_do_not_move_the_curve() -> None:
    rows = list(measured(product_cases(90), noise=0.01))
    for place in (3, 30, 60):
        rows[place] = row_of(rows[place].case, 3 * rows[place].median_s)
    (curve,) = calibrate(bench(*rows)).calibration.products
    assert curve.efficiency == pytest.approx(PRODUCT.efficiency, rel=0.03)


@pytest.mark.slow
def test_what_the_form_cannot_say_is_interpolated_and_unseen_shapes_gain() -> None:
    rows = measured(product_cases(120), extra=wavy)
    unseen = measured(product_cases(60, after=120), extra=wavy)
    found = calibrate(bench(*rows), unseen)
    (residuals,) = found.calibration.residuals
    assert len(residuals.points) == len(rows)
    held = found.reports[0].validation
    assert held is not None
    bare = calibrate(bench(*rows[:7]), unseen).reports[0].validation  # too few rows for residuals
    assert bare is not None
    assert held.median < 0.02 < bare.median


@pytest.mark.slow
def test_noise_is_not_interpolated() -> None:
    found = calibrate(bench(*measured(product_cases(90), noise=0.03)))
    assert found.calibration.residuals == ()
    assert not found.reports[0].has_residual_fit


def test_held_out_rows_that_were_fitted_do_not_count() -> None:
    rows = measured(product_cases(40))
    others = measured(product_cases(10, after=40))
    held = calibrate(bench(*rows), [*rows, *others]).reports[0].validation
    assert held is not None
    assert held.num_rows == len(others)


def test_rows_under_load_are_preferred_and_need_no_allowances() -> None:
    cool = unloaded(measured(product_cases(40)))
    hot = measured(product_cases(40, after=40), extra=lambda _: 0.2)
    both = calibrate(bench(*cool, *hot)).calibration
    alone = calibrate(bench(*hot)).calibration
    assert both.products[0].efficiency == alone.products[0].efficiency
    assert (both.software, both.sustained_slowdown) == ("meshwright", 1.0)
    at_ease = calibrate(bench(*cool)).calibration
    assert (at_ease.software, at_ease.sustained_slowdown) == ("", None)


def test_memory_bound_work_gives_a_share_for_each_class_and_one_start() -> None:
    rows = []
    for op, share in (("norm", 0.9), ("rotary", 0.6)):
        for size in (1e6, 1e8, 1e9):
            case = BenchCase(family="memory_bound", name=op, sizes={"bytes": int(size)})
            seconds = 3e-6 + size / (share * GPU.memory_bytes_per_s)
            rows.append(
                BenchRow(
                    case=case,
                    median_s=seconds,
                    p10_s=seconds,
                    p90_s=seconds,
                    num_samples=3,
                    bytes=size,
                )
            )
    found = calibrate(bench(*rows)).calibration
    shares = {curve.op: curve.efficiency for curve in found.memory}
    assert shares == {"norm": pytest.approx(0.9, rel=1e-3), "rotary": pytest.approx(0.6, rel=1e-3)}
    assert found.launch is not None
    assert found.launch.kernel_s == pytest.approx(3e-6, rel=0.01)
    device = build_device_costs(GPU, found)
    assert memory_s(device, "rotary", 1e9) == pytest.approx(rows[-1].median_s, rel=1e-3)


def moved_row(op: str, size: float, seconds: float) -> BenchRow:
    case = BenchCase(family="memory_bound", name=op, sizes={"bytes": int(size)})
    return msgspec.structs.replace(row_of(case, seconds), bytes=size)


def stream(op: str, share: float, *sizes: float, start_s: float = 3e-6) -> list[BenchRow]:
    rate = share * GPU.memory_bytes_per_s
    return [moved_row(op, size, start_s + size / rate) for size in sizes]


def test_memory_bound_work_is_scored_on_rows_left_out_and_on_held_out_ones() -> None:
    rows = [row for op in ("norm", "copy", "rotary") for row in stream(op, 0.8, 1e6, 3e7, 1e8, 1e9)]
    slow = [*stream("norm", 0.4, 5e8), *stream("copy", 0.8, 5e8), *stream("cast", 0.8, 5e8)]
    (report,) = calibrate(bench(*rows), slow).reports
    assert report.cross_validated is not None
    assert report.cross_validated.num_rows == len(rows)
    assert report.cross_validated.p95 < 0.01
    assert report.validation is not None
    assert report.validation.num_rows == 2  # casts were not fitted
    assert report.validation_by_part["norm"].worst_error == pytest.approx(-0.5, abs=0.01)
    assert report.validation_by_part["copy"].median < 0.01


def test_large_kernels_count_more_than_small_ones_of_their_class() -> None:
    rows = [*stream("optimizer", 0.8, 4e9, 8e9), *stream("optimizer", 0.6, 1e8)]
    (curve,) = calibrate(bench(*rows)).calibration.memory
    assert curve.efficiency == pytest.approx(0.8, rel=0.02)


def test_only_permutations_can_seem_faster_than_the_memory() -> None:
    for op, most in (("permute", 1.5), ("copy", 1.0)):
        (curve,) = calibrate(bench(*stream(op, 1.5, 1e6, 1e9))).calibration.memory
        assert curve.efficiency == pytest.approx(most, rel=0.01)


def link_rows(rate: float, crossing: float, start_s: float = 2e-5) -> list[BenchRow]:
    rows = []
    for name, ways in (("host_to_device", 1), ("device_to_host", 1), ("both_ways", 2)):
        for size in (1 << 16, 1 << 24, 1 << 30):
            seconds = start_s + size * (1 + (crossing if ways == 2 else 0.0)) / rate
            case = BenchCase(
                family="memory_copies", name=name, sizes={"bytes": size, "memory": "pinned"}
            )
            row = msgspec.structs.replace(row_of(case, seconds), bytes=float(ways * size))
            rows.append(row)
    return rows


def test_copies_one_way_and_both_ways_give_the_link() -> None:
    wire = GPU.pcie_bytes_per_s
    assert wire is not None
    found = calibrate(bench(*link_rows(0.9 * wire, 0.3)))
    assert found.calibration.link is not None
    assert found.calibration.link.share == pytest.approx(0.9, rel=0.01)
    assert found.calibration.link.crossing == pytest.approx(0.3, rel=0.02)
    (report,) = found.reports
    assert report.in_sample.p95 < 0.01
    one_way = [row for row in link_rows(0.9 * wire, 0.3) if row.case.name != "both_ways"]
    kept = calibrate(bench(*measured(product_cases(20)), *one_way))
    assert kept.calibration.link is None
    assert "copies to and from the host" in kept.missing


def test_launching_is_scored_by_how_far_samples_of_one_launch_scatter() -> None:
    rows = [
        msgspec.structs.replace(
            row_of(BenchCase(family="launch_overhead", name=name, sizes={"operation": word}),
                seconds),
            p90_s=seconds * (1.5 if word == "norm" else 1.1),
        )
        for name, word, seconds in (
            ("host", "add", 4e-6), ("host", "linear", 5e-6), ("host", "norm", 8e-6),
            ("graph", "", 1e-5), ("kernel", "", 1.5e-6), ("malloc", "", 1e-3),
        )
    ]  # fmt: skip
    found = calibrate(bench(*rows))
    launch = found.calibration.launch
    assert launch is not None
    assert (launch.host_s, launch.graph_s, launch.kernel_s) == (5e-6, 1e-5, 1.5e-6)
    (report,) = found.reports
    assert report.in_sample.num_rows == 5
    assert report.in_sample.median == pytest.approx(0.05)
    assert report.in_sample.worst_error == pytest.approx(0.25)
    assert report.in_sample.worst_case == "launch_overhead/host/operation=norm"


def test_what_was_not_measured_is_named() -> None:
    missing = " ".join(calibrate(bench(*measured(product_cases(20)))).missing)
    for word in ("fp8-tensorwise", "grouped", "attention forward", "norm_backward", "launching"):
        assert word in missing


def test_a_driver_s_name_finds_its_device() -> None:
    rows = measured(product_cases(20))
    assert calibrate(BenchResult(Machine(device="NVIDIA H200"), rows)).calibration.gpu == GPU.name


def test_a_processor_s_shares_are_of_what_was_measured_there() -> None:
    rows = [
        BenchRow(
            case=case,
            median_s=(
                seconds := 2e-5 + 2.0 * case.size("m") * case.size("n") * case.size("k") / 1e11
            ),
            p10_s=seconds,
            p90_s=seconds,
            num_samples=3,
            flops=2.0 * case.size("m") * case.size("n") * case.size("k"),
            bytes=1e6,
        )
        for case in product_cases(24, precision="fp32")
    ]
    found = calibrate(BenchResult(Machine(device="Some CPU @ 2 GHz", cores=2), tuple(rows)))
    assert found.gpu.kind == "cpu"
    assert found.calibration.gpu == "some-cpu-2-ghz"
    assert found.calibration.peaks is not None
    assert found.calibration.peaks.fp32_flops == pytest.approx(PEAK_HEADROOM * 1e11, rel=0.05)
    copies = [
        msgspec.structs.replace(rows[0], case=BenchCase(family="memory_copies", name="copy"),
                                bytes=size, median_s=size / rate)
        for size, rate in ((1e5, 2e11), (2e8, 3e10))
    ]  # fmt: skip
    with_copies = BenchResult(Machine(device="Some CPU @ 2 GHz", cores=2), (*rows, *copies))
    peaks = calibrate(with_copies).calibration.peaks
    assert peaks is not None
    assert peaks.memory_bytes_per_s == pytest.approx(3e10)  # the small copy never left the cache
    row = rows[5]
    m, n, k = (row.case.size(side) for side in "mnk")
    predicted = linear_s(build_device_costs(found.gpu, found.calibration), m, n, k, "fp32")
    assert predicted == pytest.approx(row.median_s, rel=0.15)


def test_rows_that_took_no_time_and_unknown_products_are_passed_over() -> None:
    rows = measured(product_cases(20))
    odd = (
        row_of(rows[0].case, 0.0),
        row_of(BenchCase(family="gemm", name="sparse", sizes={"precision": "bf16"}), 1.0),
    )
    assert calibrate(bench(*odd, *rows)).reports[0].in_sample.num_rows == len(rows)


def test_no_rows_are_refused() -> None:
    with pytest.raises(InputError, match="none to fit"):
        calibrate(BenchResult(MACHINE, ()))


def test_rows_without_any_cost_model_are_refused() -> None:
    row = row_of(BenchCase(family="storage", name="read"), 1.0)
    with pytest.raises(InputError, match="no row is of a family"):
        calibrate(bench(row))
