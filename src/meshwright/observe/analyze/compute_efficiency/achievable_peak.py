"""What a device was measured to reach, in place of what its maker states.

A peak is a product that never starts, ends or waits. The best that kernels were seen to do on a
device, as `mw calibrate` fits it, is what a run can be held against with some hope.
"""

import msgspec

from meshwright.observe.analyze.compute_efficiency.mfu import RankMfu
from meshwright.observe.analyze.compute_efficiency.trace_device import find_peak_flops
from meshwright.predict.cost import Calibration
from meshwright.predict.cost.curves import max_bandwidth_share
from meshwright.spec.cluster import Gpu

_FIELDS = {
    "fp32": "fp32_flops",
    "tf32": "tf32_flops",
    "bf16": "bf16_flops",
    "fp16": "fp16_flops",
    "fp8": "fp8_flops",
}


def apply_measured_peaks(gpu: Gpu, calibration: Calibration) -> Gpu:
    """Return a device whose peaks are the best rates that a calibration has of it.

    What was not measured stays as the catalog has it.
    """
    if calibration.peaks is not None:
        gpu = msgspec.structs.replace(gpu, **calibration.peaks.known_peaks)
    rates = dict[str, float]()
    for curve in calibration.products:
        field = _FIELDS.get(curve.precision.partition("-")[0])
        if field is not None and curve.precision in gpu.precisions:
            rate = curve.efficiency * gpu.peak_flops(curve.precision)
            rates[field] = max(rate, rates.get(field, 0.0))
    # A class whose bytes are counted twice over says nothing of the memory.
    shares = [one.efficiency for one in calibration.memory if max_bandwidth_share(one.op) == 1.0]
    if shares:
        rates["memory_bytes_per_s"] = max(shares) * gpu.memory_bytes_per_s
    return msgspec.structs.replace(gpu, **rates)


def compute_achievable_mfu(found: RankMfu, gpu: Gpu, best: Gpu) -> float | None:
    """Return a rank's MFU over what its device was measured to reach.

    None where it has no MFU, or does products of a kind that was not measured.
    """
    at_peak_s = at_best_s = 0.0
    for dtype, flops in found.flops_by_dtype.items():
        peak, rate = find_peak_flops(gpu, dtype), find_peak_flops(best, dtype)
        if peak is None or rate is None or rate == peak:
            return None
        at_peak_s += flops / peak
        at_best_s += flops / rate
    return found.mfu * at_best_s / at_peak_s if found.mfu is not None and at_peak_s else None
