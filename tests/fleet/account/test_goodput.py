"""Goodput and its parts, forecasts, prices, savings, pseudonyms."""

from pathlib import Path

import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.fleet.account import GpuHourAccount, build_account
from meshwright.fleet.account.goodput import compute_fleet_goodput, compute_goodput
from meshwright.fleet.account.prices import GpuPrices, parse_prices
from meshwright.fleet.account.redaction import load_redaction_key, redact_column
from meshwright.fleet.account.savings import (
    group_by_owner,
    group_by_remedy,
    mean_gpu_price,
    rank_savings,
)
from meshwright.fleet.account.trend import build_trend, forecast, select_complete_periods
from meshwright.spec import catalog
from tests.fleet.account.rows import DAY, HOUR, jobs, nodes, progress


def two_users(kind: str | None = None) -> GpuHourAccount:
    """Ann waits two hours and trains for six, half of it lost; Bob's job is all start-up."""
    work = jobs(
        {"job": "1", "user": "ann", "team": "a", "submit_s": 0.0, "start_s": 2 * HOUR,
         "end_s": 8 * HOUR, "gpus": 4.0, "nodes": ["n1"], "state": "failed"},
        {"job": "2", "user": "bob", "team": "b", "submit_s": 0.0, "start_s": 0.0,
         "end_s": HOUR, "gpus": 4.0, "nodes": ["n1"]},
    )  # fmt: skip
    told = progress(
        ("1", 2 * HOUR, 8 * HOUR, "productive"),
        ("1", 4 * HOUR, 5 * HOUR, "checkpoint"),
        ("2", 0, HOUR, "startup"),
    )
    mfu = [0.4 if phase == "productive" else None for phase in told["phase"].to_pylist()]
    told = told.set_column(told.column_names.index("mfu"), "mfu", [mfu])
    there = nodes({"node": "n1", "gpu_kind": kind})
    return build_account(work, there, progress=told, since_s=0, until_s=10 * HOUR)


def test_goodput_of_a_user_is_the_product_of_its_parts() -> None:
    ann, bob = compute_goodput(two_users(), "user")
    assert (ann.name, ann.allocated_hours, ann.pending_hours) == ("ann", 24, 8)
    assert ann.scheduling_goodput == pytest.approx(24 / 32)
    assert ann.runtime_goodput == pytest.approx(8 / 24)  # two hours, before the checkpoint
    assert ann.program_goodput == pytest.approx(0.4)
    assert ann.program_metric == "mfu"
    assert ann.goodput == pytest.approx(24 / 32 * 8 / 24 * 0.4)
    assert ann.ettr == pytest.approx(8 / 32)
    assert (bob.name, bob.runtime_goodput, bob.goodput) == ("bob", 0, None)


def test_scheduling_goodput_of_a_fleet_is_what_was_held_of_what_there_was() -> None:
    fleet = compute_fleet_goodput(two_users())
    assert fleet.scheduling_goodput == pytest.approx(28 / 80)
    assert fleet.num_attempts == 2


@pytest.mark.parametrize("by", ["job", "team", "partition", "workload", "cluster"])
def test_groups_share_out_all_that_was_held(by: str) -> None:
    assert sum(one.allocated_hours for one in compute_goodput(two_users(), by)) == pytest.approx(28)


def test_who_only_waits_is_told_behind_those_who_hold() -> None:
    work = jobs(
        {"job": "1", "user": "ann", "submit_s": 0.0, "start_s": 0.0, "end_s": HOUR, "gpus": 1.0,
         "nodes": ["n1"]},
        {"job": "2", "user": "bob", "submit_s": 0.0, "gpus": 16.0, "state": "pending"},
    )  # fmt: skip
    found = build_account(work, nodes({"node": "n1"}), since_s=0, until_s=2 * HOUR)
    ann, bob = compute_goodput(found, "user")
    assert (ann.allocated_hours, ann.pending_hours) == (1, 0)
    assert (bob.allocated_hours, bob.pending_hours, bob.runtime_goodput, bob.ettr) == (
        0,
        32,
        None,
        0,
    )


def test_only_the_largest_are_told_where_asked() -> None:
    assert [one.name for one in compute_goodput(two_users(), "user", most=1)] == ["ann"]


def test_a_forecast_follows_weeks() -> None:
    week = [0.9, 0.9, 0.9, 0.9, 0.8, 0.3, 0.2]
    made = forecast(week * 5)
    assert made is not None
    assert made.values == pytest.approx(week)
    assert made.rule == "as the same day of the week"
    assert made.num_tests == 31


def test_the_error_of_a_forecast_is_that_of_what_would_have_been_said() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(10, 2, 200)
    made = forecast(list(noise), ahead=1)
    assert made is not None
    # The mean of seven is off by σ·√(1 + 1/7)·√(2/π) on the average.
    assert made.error == pytest.approx(2 * np.sqrt(8 / 7) * np.sqrt(2 / np.pi), rel=0.15)


def test_a_step_that_nobody_saw_coming_is_part_of_the_error() -> None:
    made = forecast([0.2] * 10 + [0.8])
    assert made is not None
    assert made.error > 0.05


def test_too_short_a_series_has_no_forecast() -> None:
    assert forecast([0.5] * 4) is None


def test_a_day_that_is_cut_short_tells_nothing_of_days() -> None:
    found = build_account(jobs(), nodes({"node": "n1"}), since_s=0.5 * DAY, until_s=3 * DAY)
    assert [row.hours for row in build_trend(found)] == [96, 192, 192]
    assert [row.hours for row in select_complete_periods(found)] == [192, 192]


def test_a_day_that_is_known_from_its_evening_on_is_not_whole() -> None:
    there = nodes({"node": "n1", "since_s": 0.8 * DAY})
    found = build_account(jobs(), there, since_s=0, until_s=3 * DAY)
    assert [row.until_s / DAY for row in select_complete_periods(found)] == [2, 3]


def test_remedies_leave_what_they_cannot_save() -> None:
    rows = rank_savings(two_users(), GpuPrices())
    back = {(row.owner, row.bucket): row for row in rows}
    assert back["ann", "lost_work"].hours == pytest.approx(12 - 4 * 0.5)
    assert back["bob", "startup"].hours == pytest.approx(4 - 4 / 12)
    assert back["ann", "lost_work"].dollars is None
    assert ("ann", "startup") not in back
    assert [row.hours for row in rows] == sorted((row.hours for row in rows), reverse=True)


def test_prices_come_from_the_user_or_the_catalog() -> None:
    given = rank_savings(two_users(), parse_prices("2.5"))
    assert given[0].dollars == pytest.approx(2.5 * given[0].hours)
    found = two_users("NVIDIA H200")
    price = mean_gpu_price(found, GpuPrices())
    known = [
        c.price_per_gpu_hour
        for c in catalog.list_clusters().values()
        if c.gpu.name.startswith("h200")
    ]
    assert price in known
    assert mean_gpu_price(two_users("a card nobody knows"), GpuPrices()) is None
    assert mean_gpu_price(found, parse_prices("h200=3,1")) == 3


@pytest.mark.parametrize(
    ("kind", "dollars"),
    [
        ("NVIDIA H100 80GB HBM3", 2.9), ("h100-80g-sxm", 2.9), ("NVIDIA A100-PCIE-40GB", 1.1),
        ("NVIDIA A100-SXM4-80GB", 1.4), ("Tesla V100-SXM2-16GB", None), ("NVIDIA GH100", None),
    ],
)  # fmt: skip
def test_prices_hold_for_the_names_that_drivers_tell(kind: str, dollars: float | None) -> None:
    price = parse_prices("h100=2.9,a100=1.4,a100-pcie=1.1").find(kind)
    assert (price.dollars_per_hour if price else None) == dollars


def test_sums_of_savings_keep_all_hours() -> None:
    rows = rank_savings(two_users(), parse_prices("2"))
    whole = sum(row.hours for row in rows)
    for added in (group_by_owner(rows), group_by_remedy(rows)):
        assert sum(row.hours for row in added) == pytest.approx(whole)
        assert sum(row.dollars or 0 for row in added) == pytest.approx(2 * whole)


@pytest.mark.parametrize("text", ["cheap", "h100=", "h100=-1", "nan"])
def test_a_wrong_price_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is no price"):
        parse_prices(text)


def test_pseudonyms_are_stable_for_a_store_and_differ_between_stores(tmp_path: Path) -> None:
    work = jobs(
        *({"job": str(at), "user": name} for at, name in enumerate(["ann", "bob", None, "ann"]))
    )
    keys = [load_redaction_key(tmp_path), load_redaction_key(tmp_path)]
    first, again = (redact_column(work, key)["user"].to_pylist() for key in keys)
    assert first == again
    assert first[0] == first[3] != first[1]
    assert first[2] is None
    assert not {"ann", "bob"} & set(first)
    (tmp_path / "other").mkdir()
    assert redact_column(work, load_redaction_key(tmp_path / "other"))["user"].to_pylist() != first
    assert (tmp_path / "pseudonyms.key").stat().st_mode & 0o077 == 0
