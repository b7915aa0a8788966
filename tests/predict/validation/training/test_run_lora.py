"""Published fine-tuning rows train the adapters that they or their recipes name."""

from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.predict.validation.training import read_runs
from meshwright.predict.validation.training.run_lora import DEFAULT_LORA, NVIDIA_RECIPES, read_lora
from meshwright.predict.validation.training.run_score import prepare_run, score_run
from meshwright.spec.workload import LoRASpec

ROWS = read_runs(Path(__file__).parents[4] / "validation" / "training" / "runs.json")
LORA = [row for row in ROWS if row.get("task") == "lora"]


def test_other_rows_train_every_weight() -> None:
    assert {read_lora(row) for row in ROWS if row not in LORA} == {(None, ())}


def test_recipes_stand_in_where_a_row_does_not_say() -> None:
    assert {read_lora(row)[0] for row in LORA if "AutoModel" in row["family"]} == {DEFAULT_LORA}
    assert {read_lora(row)[0] for row in LORA if "Bridge" in row["family"]} == {NVIDIA_RECIPES}


def test_a_guessed_adapter_is_named_among_what_was_assumed() -> None:
    for row in LORA:
        assert any("adapters of rank 16" in text for text in score_run(row).assumed)


def test_a_row_may_state_its_adapter() -> None:
    row = {**LORA[0], "adapter": {"rank": 64, "targets": ["up", "down"]}}
    assert read_lora(row) == (LoRASpec(rank=64, targets=("up", "down")), ())
    ready = prepare_run(row)
    assert ready is not None
    assert ready.build_run().frozen


def test_a_stated_adapter_is_read_strictly() -> None:
    with pytest.raises(InputError, match="rank"):
        read_lora({**LORA[0], "adapter": {"r": 64}})


def test_fine_tuning_rows_are_predicted_as_well_as_others() -> None:
    errors = sorted(abs(score_run(row).error or 9.0) for row in LORA)
    assert errors[len(errors) // 2] < 0.1
    assert errors[-1] < 0.25
