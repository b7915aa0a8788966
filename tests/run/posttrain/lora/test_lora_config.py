"""An `[adapter]` may have PEFT's spellings of its fields; both of one field are refused."""

from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.run.posttrain.lora.lora_config import (
    PEFT_SPELLINGS,
    AdapterConfig,
    LoRAConfig,
    rename_peft_fields,
    to_peft_config,
)
from meshwright.spec.serialization import decode


def test_all_spellings_of_peft_are_accepted() -> None:
    peft = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "use_rslora": True, "use_dora": True}
    data = rename_peft_fields({"adapter": {**peft, "target_modules": ["q_proj"]}, "seed": 1})
    assert data["seed"] == 1
    assert decode(AdapterConfig, data["adapter"]) == AdapterConfig(
        rank=4, alpha=8, dropout=0.1, rslora=True, dora=True, target_modules=("q_proj",)
    )


def test_they_are_the_names_that_peft_writes() -> None:
    assert set(PEFT_SPELLINGS) <= set(to_peft_config(LoRAConfig(), ["q_proj"], []))


@pytest.mark.parametrize("peft", PEFT_SPELLINGS)
def test_both_spellings_of_a_field_are_refused(peft: str) -> None:
    adapter: dict[str, Any] = {peft: 1, PEFT_SPELLINGS[peft]: 1}
    with pytest.raises(InputError, match=rf"adapter\.{peft}: .* both are given"):
        rename_peft_fields({"adapter": adapter})


@pytest.mark.parametrize("adapter", [None, "all-linear", {}])
def test_what_has_no_such_field_stays_as_it_is(adapter: object) -> None:
    assert rename_peft_fields({"adapter": adapter}) == {"adapter": adapter}
    assert rename_peft_fields({}) == {}
