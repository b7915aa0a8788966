"""The optimizer update with torch operations, number for number what the Triton kernel computes.

On a CPU both give the same bits. On a GPU the kernel's division, root and fused multiply-add may
differ from torch's in the last place.
"""

from collections.abc import Sequence

import torch

from meshwright.run.kernels.optimizer.block_quantization import (
    block_scales_reference,
    dequantize_blocks,
    quantize_blocks,
)
from meshwright.run.kernels.optimizer.stochastic_rounding import (
    RandomBits,
    generate_random_bits_reference,
    make_rounding_keys_reference,
    stochastic_round_bf16_reference,
)
from meshwright.run.kernels.optimizer.update_inputs import (
    OptimizerMoment,
    OptimizerTensors,
    StepScalars,
    UpdateRule,
)


@torch.no_grad()
def update_reference_(
    tensors: OptimizerTensors, grads: Sequence[torch.Tensor], pace: StepScalars, rule: UpdateRule
) -> None:
    """Update every parameter in place, one after the other; waits to learn whether to."""
    if not bool(pace.scalars[0]):
        return
    for index, grad in enumerate(grads):
        _update_one(tensors, index, grad, pace, rule)


def _update_one(
    tensors: OptimizerTensors, index: int, grad: torch.Tensor, pace: StepScalars, rule: UpdateRule
) -> None:
    _, grad_scale, lr, correction, root_correction = pace.scalars
    g = grad.float() * grad_scale
    keeps = (rule.beta1, rule.beta2) if rule.name == "adamw" else (1.0, 1.0)
    moments = [
        _read(moment, index, keep) for moment, keep in zip(tensors.moments, keeps, strict=False)
    ]
    update = _follow_(g, moments, rule, root_correction)

    bits = _bits(tensors, index, pace)
    for moment, value, chance in zip(tensors.moments, moments, bits[1:], strict=False):
        _write(moment, index, value, chance)
    if rule.writes_weights:
        size = lr * tensors.lr_multipliers[index] * correction
        keep = 1 - lr * tensors.weight_decays[index]
        param = tensors.params[index]
        held = tensors.masters[index] if tensors.masters else param
        w = held.float().mul_(keep).sub_(update.mul_(size))
        if held.dtype == torch.bfloat16:
            param.copy_(stochastic_round_bf16_reference(w, bits[0]))
        elif w is not param:
            param.copy_(w)
    elif rule.name == "direction":
        grad.copy_(update)


def _follow_(
    g: torch.Tensor, moments: list[torch.Tensor], rule: UpdateRule, root_correction: torch.Tensor
) -> torch.Tensor:
    """Bring the moments to their next values and return the update, which may take g's place.

    AdamW's moments come faded already.
    """
    rest1, rest2 = 1 - rule.beta1, 1 - rule.beta2
    if rule.name == "apply":
        return g
    m = moments[0]
    if rule.name == "adamw":
        m.add_(g * rest1)
        v = moments[1].add_(g.mul_(g).mul_(rest2))
        divisor = v.sqrt().mul_(root_correction).add_(rule.eps)
        return torch.mul(m, divisor.square_().rsqrt_(), out=g)
    if rule.name == "lion":
        away = g.sub_(m)
        update = (m + away * rest1).sign_()
        m.add_(away.mul_(rest2))
        return update
    if rule.name == "sgd":
        m.mul_(rule.beta1).add_(g)
        return g.add_(m * rule.beta1) if rule.nesterov else g.copy_(m)
    m.add_((g - m).mul_(rest1))
    return g.add_((m - g).mul_(rule.beta1)) if rule.nesterov else g.copy_(m)


def _bits(tensors: OptimizerTensors, index: int, pace: StepScalars) -> RandomBits:
    """Return the random bits for the weight and the two moments; nothing where none are needed."""
    param = tensors.params[index]
    precisions = {moment.dtype_name for moment in tensors.moments}
    if precisions <= {"fp32"} and (tensors.masters or param.dtype != torch.bfloat16):
        return RandomBits(*[torch.empty(0)] * 3)
    keys = make_rounding_keys_reference(tensors.rounding_keys[index], int(pace.step))
    places = tensors.global_index_maps[index].from_ranges(param.numel(), param.device)
    return generate_random_bits_reference(keys, places.view(param.shape))


def _read(moment: OptimizerMoment, index: int, keep: float) -> torch.Tensor:
    """Return `keep` times a moment in float32: the moment itself, changed, where it is kept so."""
    if moment.scales:
        return dequantize_blocks(moment.values[index], moment.scales[index] * keep)
    return moment.values[index].float().mul_(keep)


def _write(moment: OptimizerMoment, index: int, value: torch.Tensor, bits: torch.Tensor) -> None:
    into = moment.values[index]
    if moment.scales:
        moment.scales[index].copy_(block_scales_reference(value))
        into.copy_(quantize_blocks(value, moment.scales[index], bits, into.dtype))
    elif into.dtype == torch.bfloat16:
        into.copy_(stochastic_round_bf16_reference(value, bits << 8))
