"""GPUs whose clocks are held back: heat, power, settings."""

from collections.abc import Iterator

import numpy as np

from meshwright.fleet.patterns.data.fleet_data import FleetData
from meshwright.fleet.patterns.data.group_math import Flags, Floats
from meshwright.fleet.patterns.evidence_text import format_duration, format_names, format_percent
from meshwright.fleet.patterns.fleet_pattern import (
    FleetDetection,
    FleetPattern,
    register_fleet_pattern,
)
from meshwright.fleet.statistics.robust import group_medians

MIN_PEERS = 20
_LOST = "estimated: GPU-hours under load times the part of the usual clock that is lost"


def median_loaded_clock(fleet: FleetData) -> Floats:
    """The clock that is usual under such a load: the median of uses of the same kind of GPU.

    What keeps tensor cores busier draws more power and clocks lower, and rightly so: uses are
    compared with those in the same tenth of tensor activity, where there are enough of them.
    """
    kinds, uses = fleet.gpu_kinds, fleet.utilization
    number = len(kinds.values)
    clock = np.where(fleet.loaded_uses, uses["busy_sm_clock_mhz"], np.nan)
    of_kind = group_medians(clock, kinds.codes, number)[kinds.codes]
    tenth = np.floor(np.clip(np.nan_to_num(uses["busy_tensor_active"]), 0, 0.99) * 10)
    group = kinds.codes * 10 + tenth.astype(np.int64)
    count = np.bincount(group[~np.isnan(clock)], minlength=10 * number)
    alike = group_medians(clock, group, 10 * number)
    return np.where(count[group] >= MIN_PEERS, alike[group], of_kind)


def measure_clock_deficit(fleet: FleetData) -> Floats:
    """The part of the usual clock that each use lacks under load."""
    with np.errstate(divide="ignore", invalid="ignore"):
        lost = 1 - fleet.utilization["busy_sm_clock_mhz"] / median_loaded_clock(fleet)
    return np.clip(np.nan_to_num(lost), 0, 1)


def _best(fleet: FleetData, name: str) -> Floats:
    """The figure that nine in ten uses of a kind of GPU stay below, for each use."""
    kinds = fleet.gpu_kinds
    found = np.full(len(kinds.values), np.nan)
    for at in range(found.size):
        own = fleet.utilization[name][(kinds.codes == at) & fleet.loaded_uses]
        own = own[~np.isnan(own)]
        found[at] = np.quantile(own, 0.9) if own.size else np.nan
    return found[kinds.codes] if found.size else np.zeros(0)


def is_heat_limited(fleet: FleetData) -> Flags:
    """Uses that heat holds back."""
    return (
        fleet.loaded_uses
        & (fleet.utilization["thermal"] >= 0.05)
        & (measure_clock_deficit(fleet) >= 0.02)
    )


def is_power_limited(fleet: FleetData) -> Flags:
    """Uses that a brake holds back, or a cap below what others of their kind draw."""
    uses = fleet.utilization
    starved = (uses["power_cap"] >= 0.5) & (
        uses["peak_power_w"] <= 0.85 * _best(fleet, "peak_power_w")
    )
    weak = (uses["brake"] >= 0.05) | starved
    return (
        fleet.loaded_uses
        & weak
        & ~(uses["thermal"] >= 0.05)
        & (measure_clock_deficit(fleet) >= 0.03)
    )


def is_clock_locked(fleet: FleetData) -> Flags:
    """Uses whose clock stands still below what others of their kind reach."""
    uses = fleet.utilization
    flat = uses["clock_varies"] <= 0.005 * uses["busy_sm_clock_mhz"]
    never = uses["peak_sm_clock_mhz"] <= 0.93 * _best(fleet, "peak_sm_clock_mhz")
    other = (uses["brake"] >= 0.05) | (uses["thermal"] >= 0.05) | (uses["power_cap"] >= 0.5)
    return fleet.loaded_uses & flat & never & ~other


def make_node_detections(fleet: FleetData, which: Flags, what: str) -> Iterator[FleetDetection]:
    """A hit for each node with such uses; all jobs of a node pay where it holds back one GPU."""
    uses, lost = fleet.utilization, measure_clock_deficit(fleet)
    for node in np.unique(uses.node[which]).tolist():
        own = np.flatnonzero(which & (uses.node == node))
        cost = float((uses["busy_s"][own] / 3600 * lost[own]).sum())

        def tell(node: int = node, own: "np.ndarray[tuple[int], np.dtype[np.int64]]" = own) -> (
            tuple[str, ...]
        ):  # fmt: skip
            worst = own[int(np.argmax(lost[own] * uses["busy_s"][own]))]
            heat = uses["busy_temperature_c"][worst]
            return (
                f"{fleet.node_index.names[node]}: GPUs "
                f"{format_names(f'{gpu}' for gpu in uses.gpu[own])} "
                f"{what} for {format_duration(float(uses['busy_s'][own].sum()))} under load",
                f"GPU {uses.gpu[worst]}: {uses['busy_sm_clock_mhz'][worst]:.0f} MHz where "
                f"{median_loaded_clock(fleet)[worst]:.0f} is usual, {format_percent(lost[worst])} "
                f"less" + (f", {heat:.0f} °C" if not np.isnan(heat) else ""),
            )

        yield FleetDetection(cost, tell, nodes=(fleet.node_index.names[node],))


@register_fleet_pattern(
    FleetPattern(
        "thermal-throttled",
        "GPUs are too hot and slow down",
        "hardware",
        "DCGM's bits for heat (0x20, 0x40) are set in 5 % of samples under load or more, and the "
        "clock is 2 % below the usual one of its kind under such load or more",
        _LOST,
        "clean filters and check fans and inlet temperature of the node (ipmitool sdr type "
        "Temperature); until then drain it: scontrol update nodename=NODE state=drain reason=heat",
        owner="operators",
        min_gpu_hours=0.2,
    )
)
def find_thermal_throttling(fleet: FleetData) -> Iterator[FleetDetection]:
    """Heat bits and a lower clock."""
    yield from make_node_detections(fleet, is_heat_limited(fleet), "held back by heat")


@register_fleet_pattern(
    FleetPattern(
        "power-throttled",
        "GPUs get too little power and slow down",
        "hardware",
        "the power brake (0x80, 0x8) is set in 5 % of samples under load or more, or the power cap "
        "(0x4) in half of them at 85 % or less of the watts that others of its kind draw; and the "
        "clock is 3 % below the usual one under such load or more",
        _LOST,
        "check power supplies (ipmitool sdr type 'Power Supply') and the limit: nvidia-smi -q -d "
        "POWER; set it back with nvidia-smi -pl to the default",
        owner="operators",
        min_gpu_hours=0.5,
    )
)
def find_power_throttling(fleet: FleetData) -> Iterator[FleetDetection]:
    """Power bits where others draw more: at the top of its watts every busy GPU is capped."""
    yield from make_node_detections(fleet, is_power_limited(fleet), "held back by power")


@register_fleet_pattern(
    FleetPattern(
        "clocks-locked-low",
        "Clocks are locked below what the GPU can do",
        "hardware",
        "the clock under load stands still (0.5 % or less), 7 % or more below what others of its "
        "kind reach, and neither heat nor power is the reason",
        _LOST,
        "nvidia-smi -rgc; nvidia-smi -rac on the node, and the same in the epilog",
        owner="operators",
        min_gpu_hours=0.5,
    )
)
def find_locked_clocks(fleet: FleetData) -> Iterator[FleetDetection]:
    """A flat clock that is too low."""
    yield from make_node_detections(fleet, is_clock_locked(fleet), "locked")
