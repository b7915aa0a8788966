"""Predictions against published measurements: the errors that the docs state."""

from typing import get_args

import pytest

from meshwright.predict.network.link_corrections import load_corrections
from meshwright.predict.validation.collectives import (
    ScoredCollective,
    read_sweep_rows,
    score_collectives,
    summarize_collectives,
    summarize_group,
)
from meshwright.spec.cluster.cluster_components import FabricKind
from validation.collectives import page
from validation.collectives.fit import Fitter, held_out
from validation.collectives.pack import RUNS
from validation.collectives.samples import samples

ROWS = read_sweep_rows(RUNS)


@pytest.fixture(scope="module")
def scored() -> list[ScoredCollective]:
    return score_collectives(ROWS)


def test_errors_stay_within_the_targets(scored: list[ScoredCollective]) -> None:
    group = summarize_collectives(scored).overall
    assert group.large_median is not None
    assert group.small_median is not None
    assert group.large_median <= 0.08
    assert group.small_median <= 0.15


def test_systems_never_seen_stay_within_the_targets() -> None:
    group = summarize_group(held_out(ROWS, load_corrections(), "system", parts=2))
    assert group.large_median is not None
    assert group.small_median is not None
    assert group.large_median <= 0.12
    assert group.small_median <= 0.25


@pytest.mark.slow
def test_sources_never_seen_stay_within_the_targets() -> None:
    group = summarize_group(held_out(ROWS, load_corrections(), "source"))
    assert group.large_median is not None
    assert group.small_median is not None
    assert group.large_median <= 0.12
    assert group.small_median <= 0.25


def test_network_that_no_row_is_about_takes_what_its_kin_make_likely(
    scored: list[ScoredCollective],
) -> None:
    data = [sample for sample in samples(ROWS, scored) if sample.kind in ("infiniband", "roce")]
    table = Fitter(load_corrections()).fitted(data)
    seen = sorted((table["infiniband"].delay_us, table["roce"].delay_us))
    assert seen[0] <= table["slingshot"].delay_us <= seen[1]
    assert table["slingshot"].per == "hop"
    assert table["slingshot"].rows == 0


def test_page_states_the_constants_and_errors_of_the_code() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.constants() in text, "run python -m validation.collectives.page"
    assert page.errors() in text, "run python -m validation.collectives.page"


@pytest.mark.slow
def test_page_is_up_to_date() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.renewed(text) == text, "run python -m validation.collectives.page"


def test_no_kind_of_link_is_without_constants() -> None:
    kinds = set(get_args(FabricKind)) - {"none"}
    assert kinds <= set(load_corrections())
