"""Published fine-tuning rows train the adapters that they or their recipes name."""

from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.predict.published import read_rows
from meshwright.predict.published.adapters import NVIDIA_RECIPES, USUAL, adapter_of
from meshwright.predict.published.score import prepare, score_row
from meshwright.spec.workload import Adapter

ROWS = read_rows(Path(__file__).parents[3] / "validation" / "training" / "runs.json")
LORA = [row for row in ROWS if row.get("task") == "lora"]


def test_other_rows_train_every_weight() -> None:
    assert {adapter_of(row) for row in ROWS if row not in LORA} == {(None, ())}


def test_recipes_stand_in_where_a_row_does_not_say() -> None:
    assert {adapter_of(row)[0] for row in LORA if "AutoModel" in row["family"]} == {USUAL}
    assert {adapter_of(row)[0] for row in LORA if "Bridge" in row["family"]} == {NVIDIA_RECIPES}


def test_a_guessed_adapter_is_named_among_what_was_assumed() -> None:
    for row in LORA:
        assert any("adapters of rank 16" in text for text in score_row(row).assumed)


def test_a_row_may_state_its_adapter() -> None:
    row = {**LORA[0], "adapter": {"rank": 64, "targets": ["up", "down"]}}
    assert adapter_of(row) == (Adapter(rank=64, targets=("up", "down")), ())
    ready = prepare(row)
    assert ready is not None
    assert ready.run().frozen


def test_a_stated_adapter_is_read_strictly() -> None:
    with pytest.raises(InputError, match="rank"):
        adapter_of({**LORA[0], "adapter": {"r": 64}})


def test_fine_tuning_rows_are_predicted_as_well_as_others() -> None:
    errors = sorted(abs(score_row(row).error or 9.0) for row in LORA)
    assert errors[len(errors) // 2] < 0.1
    assert errors[-1] < 0.25
