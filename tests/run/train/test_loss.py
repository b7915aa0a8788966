"""What is added to the loss by default, and what a job may set."""

import pytest

from meshwright.errors import InputError
from meshwright.run.train.loss import BALANCE, LossSettings
from meshwright.spec import catalog


@pytest.mark.parametrize(
    ("name", "balance"),
    [("llama3.1-8b", 0.0), ("mixtral-8x7b", BALANCE), ("deepseek-v3", 0.0)],
)
def test_experts_without_a_balancing_bias_get_a_loss(name: str, balance: float) -> None:
    assert LossSettings().options(catalog.model(name)).balance_weight == balance


def test_what_is_set_holds_for_every_model() -> None:
    options = LossSettings(balance=0.5, multi_token=0.3, z=1e-4).options(
        catalog.model("deepseek-v3")
    )
    assert (options.balance_weight, options.multi_token_weight, options.z_loss) == (0.5, 0.3, 1e-4)


def test_weights_below_nought_are_refused() -> None:
    with pytest.raises(InputError, match="balance"):
        LossSettings(balance=-1.0)
