"""What is added to the loss by default, and what a job may set."""

import pytest

from meshwright.errors import InputError
from meshwright.run.train.job.loss_config import DEFAULT_AUX_LOSS_COEFF, LossConfig
from meshwright.spec import catalog


@pytest.mark.parametrize(
    ("name", "balance"),
    [("llama3.1-8b", 0.0), ("mixtral-8x7b", DEFAULT_AUX_LOSS_COEFF), ("deepseek-v3", 0.0)],
)
def test_experts_without_a_balancing_bias_get_a_loss(name: str, balance: float) -> None:
    assert LossConfig().make_build_options(catalog.get_model(name)).moe_aux_loss_coeff == balance


def test_what_is_set_holds_for_every_model() -> None:
    options = LossConfig(
        moe_aux_loss_coeff=0.5, mtp_loss_scaling_factor=0.3, z_loss_coeff=1e-4
    ).make_build_options(catalog.get_model("deepseek-v3"))
    assert (options.moe_aux_loss_coeff, options.mtp_loss_scaling_factor, options.z_loss_coeff) == (
        0.5,
        0.3,
        1e-4,
    )


def test_negative_weights_are_refused() -> None:
    with pytest.raises(InputError, match="moe_aux_loss_coeff"):
        LossConfig(moe_aux_loss_coeff=-1.0)
