"""`LossSettings`: what training adds to the cross-entropy of the next token."""

import msgspec

from meshwright.run.nn.build import Options
from meshwright.spec.bounds import Bounds
from meshwright.spec.model import Experts, Model

BALANCE = 0.01
"""Weight of the loss that spreads tokens over experts (Switch Transformer, arXiv 2101.03961)."""


class LossSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Terms beside the cross-entropy, and the bias that balances experts without one."""

    balance: float | None = None
    """Weight of the loss that spreads tokens over experts; None is 0.01 for models whose experts
    have no balancing bias, and 0 for those that have (DeepSeek-V3)."""
    balance_rate: float = 0.001
    """How far a step moves the balancing bias, where there is one (arXiv 2412.19437 §4.2)."""
    multi_token: float = 0.1
    """Share of the heads that predict further tokens; 0 leaves them untrained."""
    z: float = 0.0
    """Multiple of log²Σexp(logits) that keeps logits from growing (PaLM, arXiv 2204.02311)."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.not_negative(balance_rate=self.balance_rate, multi_token=self.multi_token, z=self.z)
        if self.balance is not None:
            bounds.not_negative(balance=self.balance)
        bounds.require()

    def options(self, model: Model) -> Options:
        """Return the settings as the modules of a model take them."""
        balance = self.balance
        if balance is None:
            routed = [block.mlp for block in model.blocks if isinstance(block.mlp, Experts)]
            biased = all(experts.router_bias == "balance" for experts in routed)
            balance = 0.0 if biased else BALANCE
        return Options(multi_token_weight=self.multi_token, balance_weight=balance, z_loss=self.z)
