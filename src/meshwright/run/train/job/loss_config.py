"""`LossConfig`: what training adds to the cross-entropy of the next token."""

import msgspec

from meshwright.run.nn.decoder_builder import BuildOptions
from meshwright.spec.field_checks import FieldChecker
from meshwright.spec.model import Model, MoESpec

DEFAULT_AUX_LOSS_COEFF = 0.01
"""Weight of the loss that spreads tokens over experts (Switch Transformer, arXiv 2101.03961)."""


class LossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Terms beside the cross-entropy, and the bias that balances experts without one."""

    moe_aux_loss_coeff: float | None = None
    """Weight of the loss that spreads tokens over experts; None is 0.01 for models whose experts
    have no balancing bias, and 0 for those that have (DeepSeek-V3)."""
    moe_router_bias_update_rate: float = 0.001
    """How far a step moves the balancing bias, where there is one (arXiv 2412.19437 §4.2)."""
    mtp_loss_scaling_factor: float = 0.1
    """Share of the heads that predict further tokens; 0 leaves them untrained."""
    z_loss_coeff: float = 0.0
    """Multiple of log²Σexp(logits) that keeps logits from growing (PaLM, arXiv 2204.02311)."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.not_negative(
            moe_router_bias_update_rate=self.moe_router_bias_update_rate,
            mtp_loss_scaling_factor=self.mtp_loss_scaling_factor,
            z_loss_coeff=self.z_loss_coeff,
        )
        if self.moe_aux_loss_coeff is not None:
            bounds.not_negative(moe_aux_loss_coeff=self.moe_aux_loss_coeff)
        bounds.raise_problems()

    def make_build_options(self, model: Model) -> BuildOptions:
        """Return the settings as the modules of a model take them."""
        balance = self.moe_aux_loss_coeff
        if balance is None:
            routed = [block.mlp for block in model.blocks if isinstance(block.mlp, MoESpec)]
            biased = all(experts.router_bias == "balance" for experts in routed)
            balance = 0.0 if biased else DEFAULT_AUX_LOSS_COEFF
        return BuildOptions(
            mtp_loss_scaling_factor=self.mtp_loss_scaling_factor,
            moe_aux_loss_coeff=balance,
            z_loss_coeff=self.z_loss_coeff,
        )
