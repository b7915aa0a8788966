"""GPUs whose clocks are held back: heat, power, settings."""

from collections.abc import Iterator

import numpy as np

from meshwright.observe.fleet.measures.robust import group_medians
from meshwright.observe.fleet.patterns.arrays import Flags, Floats
from meshwright.observe.fleet.patterns.fleet import Fleet
from meshwright.observe.fleet.patterns.registry import Hit, Pattern, pattern
from meshwright.observe.fleet.patterns.say import lasted, share, some

FEWEST_ALIKE = 20
_LOST = "estimated: GPU-hours under load times the part of the usual clock that is lost"


def usual_clock(fleet: Fleet) -> Floats:
    """The clock that is usual under such a load: the median of uses of the same kind of GPU.

    What keeps tensor cores busier draws more power and clocks lower, and rightly so: uses are
    compared with those in the same tenth of tensor activity, where there are enough of them.
    """
    kinds, uses = fleet.kinds, fleet.uses
    number = len(kinds.values)
    clock = np.where(fleet.loaded, uses["busy_sm_clock_mhz"], np.nan)
    of_kind = group_medians(clock, kinds.codes, number)[kinds.codes]
    tenth = np.floor(np.clip(np.nan_to_num(uses["busy_tensor_active"]), 0, 0.99) * 10)
    group = kinds.codes * 10 + tenth.astype(np.int64)
    count = np.bincount(group[~np.isnan(clock)], minlength=10 * number)
    alike = group_medians(clock, group, 10 * number)
    return np.where(count[group] >= FEWEST_ALIKE, alike[group], of_kind)


def slowed(fleet: Fleet) -> Floats:
    """The part of the usual clock that each use lacks under load."""
    with np.errstate(divide="ignore", invalid="ignore"):
        lost = 1 - fleet.uses["busy_sm_clock_mhz"] / usual_clock(fleet)
    return np.clip(np.nan_to_num(lost), 0, 1)


def _best(fleet: Fleet, name: str) -> Floats:
    """The figure that nine in ten uses of a kind of GPU stay below, for each use."""
    kinds = fleet.kinds
    found = np.full(len(kinds.values), np.nan)
    for at in range(found.size):
        own = fleet.uses[name][(kinds.codes == at) & fleet.loaded]
        own = own[~np.isnan(own)]
        found[at] = np.quantile(own, 0.9) if own.size else np.nan
    return found[kinds.codes] if found.size else np.zeros(0)


def too_hot(fleet: Fleet) -> Flags:
    """Uses that heat holds back."""
    return fleet.loaded & (fleet.uses["thermal"] >= 0.05) & (slowed(fleet) >= 0.02)


def too_weak(fleet: Fleet) -> Flags:
    """Uses that a brake holds back, or a cap below what others of their kind draw."""
    uses = fleet.uses
    starved = (uses["power_cap"] >= 0.5) & (
        uses["peak_power_w"] <= 0.85 * _best(fleet, "peak_power_w")
    )
    weak = (uses["brake"] >= 0.05) | starved
    return fleet.loaded & weak & ~(uses["thermal"] >= 0.05) & (slowed(fleet) >= 0.03)


def locked_low(fleet: Fleet) -> Flags:
    """Uses whose clock stands still below what others of their kind reach."""
    uses = fleet.uses
    flat = uses["clock_varies"] <= 0.005 * uses["busy_sm_clock_mhz"]
    never = uses["peak_sm_clock_mhz"] <= 0.93 * _best(fleet, "peak_sm_clock_mhz")
    other = (uses["brake"] >= 0.05) | (uses["thermal"] >= 0.05) | (uses["power_cap"] >= 0.5)
    return fleet.loaded & flat & never & ~other


def of_nodes(fleet: Fleet, which: Flags, what: str) -> Iterator[Hit]:
    """A hit for each node with such uses; all jobs of a node pay where it holds back one GPU."""
    uses, lost = fleet.uses, slowed(fleet)
    for node in np.unique(uses.node[which]).tolist():
        own = np.flatnonzero(which & (uses.node == node))
        cost = float((uses["busy_s"][own] / 3600 * lost[own]).sum())

        def tell(node: int = node, own: "np.ndarray[tuple[int], np.dtype[np.int64]]" = own) -> (
            tuple[str, ...]
        ):  # fmt: skip
            worst = own[int(np.argmax(lost[own] * uses["busy_s"][own]))]
            heat = uses["busy_temperature_c"][worst]
            return (
                f"{fleet.places.names[node]}: GPUs {some(f'{gpu}' for gpu in uses.gpu[own])} "
                f"{what} for {lasted(float(uses['busy_s'][own].sum()))} under load",
                f"GPU {uses.gpu[worst]}: {uses['busy_sm_clock_mhz'][worst]:.0f} MHz where "
                f"{usual_clock(fleet)[worst]:.0f} is usual, {share(lost[worst])} less"
                + (f", {heat:.0f} °C" if not np.isnan(heat) else ""),
            )

        yield Hit(cost, tell, nodes=(fleet.places.names[node],))


@pattern(
    Pattern(
        "thermal-throttled",
        "GPUs are too hot and slow down",
        "hardware",
        "DCGM's bits for heat (0x20, 0x40) are set in 5 % of samples under load or more, and the "
        "clock is 2 % below the usual one of its kind under such load or more",
        _LOST,
        "clean filters and check fans and inlet temperature of the node (ipmitool sdr type "
        "Temperature); until then drain it: scontrol update nodename=NODE state=drain reason=heat",
        owner="operators",
        least_hours=0.2,
    )
)
def thermal(fleet: Fleet) -> Iterator[Hit]:
    """Heat bits and a lower clock."""
    yield from of_nodes(fleet, too_hot(fleet), "held back by heat")


@pattern(
    Pattern(
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
        least_hours=0.5,
    )
)
def power(fleet: Fleet) -> Iterator[Hit]:
    """Power bits where others draw more: at the top of its watts every busy GPU is capped."""
    yield from of_nodes(fleet, too_weak(fleet), "held back by power")


@pattern(
    Pattern(
        "clocks-locked-low",
        "Clocks are locked below what the GPU can do",
        "hardware",
        "the clock under load stands still (0.5 % or less), 7 % or more below what others of its "
        "kind reach, and neither heat nor power is the reason",
        _LOST,
        "nvidia-smi -rgc; nvidia-smi -rac on the node, and the same in the epilog",
        owner="operators",
        least_hours=0.5,
    )
)
def locked(fleet: Fleet) -> Iterator[Hit]:
    """A flat clock that is too low."""
    yield from of_nodes(fleet, locked_low(fleet), "locked")
