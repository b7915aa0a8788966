"""How sound each node is, what to do with it, why, and what would clear it.

The score is 100 × the product of (1 − w · 2^(−age / 7 days)) over a node's faults, times (1 − w)
for each way in which it differs from its peers. It is for ranking and for fading away; whether to
drain is not decided by it but by named faults, which stand until something clears them. The same
data gives the same advice, whenever it is asked for.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from meshwright.fleet.health.node_faults import NodeFault
from meshwright.fleet.health.outliers import NodeAnomaly
from meshwright.fleet.health.recovery import RecoveryHistory
from meshwright.fleet.health.xids import REPAIR_STEPS

NodeAction = Literal["drain", "check", "watch", "ok", "unknown"]

HALF_LIFE_S: Final = 7 * 86_400.0
CLEARED_WEIGHT: Final = 1 / 3
"""What is left of the weight of a fault that has been cleared."""
CHECK_BELOW: Final = 70.0
WATCH_BELOW: Final = 90.0
ACTION_ORDER: Final[tuple[NodeAction, ...]] = ("drain", "check", "watch", "unknown", "ok")
_CHECK: Final = "when it is next free: mw bench --quick --health-check, or dcgmi diag -r 2"
_SILENT: Final = "see whether the node is up, and its exporter runs"


class NodeHealth(NamedTuple):
    """The health of one node."""

    cluster: str
    node: str
    score: float | None
    """None: nothing is known of it."""
    action: NodeAction
    reasons: tuple[str, ...]
    """Why, gravest first."""
    action_text: str
    cleared_by: str
    """What takes the advice back."""
    state: str
    """As the scheduler has it; empty: nobody tells."""
    is_lemon: bool
    faults: tuple[NodeFault, ...]
    anomalies: tuple[NodeAnomaly, ...]

    @property
    def is_out(self) -> bool:
        """Whether the scheduler keeps jobs away already."""
        return self.state in ("down", "draining")


def score_node(
    faults: Iterable[tuple[NodeFault, bool]], signs: Iterable[NodeAnomaly], now_s: float
) -> float:
    """Return 0 to 100 from faults, each with whether it is cleared, and signs."""
    left = 1.0
    for fault, cleared in faults:
        age_s = max(0.0, now_s - fault.last_s)
        weight = fault.weight * 2.0 ** (-age_s / HALF_LIFE_S)
        left *= 1 - weight * (CLEARED_WEIGHT if cleared else 1.0)
    for sign in signs:
        left *= 1 - sign.weight
    return 100.0 * left


def assess_node(
    place: tuple[str, str],
    faults: tuple[NodeFault, ...],
    signs: tuple[NodeAnomaly, ...],
    clearing: RecoveryHistory,
    now_s: float,
    *,
    incidents: int = 0,
    rate: float | None = None,
    known: bool = True,
) -> NodeHealth:
    """Judge one node; `rate` is what is usual of incidents where the node is a lemon."""
    state = clearing.find_node_state(place)
    if not known and not faults and not signs:
        why = ("no samples, events or jobs of it are known in this time",)
        return NodeHealth(
            *place,
            None,
            "unknown",
            why,
            "see that its exporters are scraped",
            "telemetry",
            state,
            False,
            (),
            (),
        )
    stands = [(fault, clearing.is_cleared(fault)) for fault in faults]
    points = score_node(stands, signs, now_s)
    open_ones = [fault for fault, done in stands if fault.advice.action == "drain" and not done]
    lemon = rate is not None
    reasons = [_told(fault, now_s) for fault in reversed(open_ones)]
    if lemon:
        reasons.append(f"fails again and again: {incidents} incidents, {rate:.2g} are usual")
    if open_ones or lemon:
        worst = max(open_ones, key=lambda one: (_GRAVITY[one.advice.repair], one.last_s),
                    default=None)  # fmt: skip
        todo, clears = (worst.action_text, _CLEARS[worst.advice.repair]) if worst else ("", "")
        if lemon:
            todo = f"{todo}; then burn it in (mw bench --burn-in 60)".lstrip("; ")
            clears = "a device that was exchanged, or a passed check (event `checked`)"
        action: NodeAction = "drain"
    else:
        action = "check" if points < CHECK_BELOW else "watch" if points < WATCH_BELOW else "ok"
        todo = _CHECK if action == "check" else ""
        clears = "fades by half each week" if action in ("check", "watch") else ""
        if action != "ok" and not faults and all(sign.kind == "silent" for sign in signs):
            todo, clears = _SILENT, "samples that come again"
    shown = [
        _told(fault, now_s, done) for fault, done in reversed(stands) if fault not in open_ones
    ]
    reasons += _some([*(_sign(sign) for sign in signs), *shown])
    return NodeHealth(
        *place, points, action, tuple(reasons), todo, clears, state, lemon, faults, signs
    )


_GRAVITY: Final = {"": 0, "reset": 1, "reboot": 2, "replace": 3}
_CLEARS: Final = {
    "reset": "a reboot, a return to service, another device, or a passed check (event `checked`)",
    "reboot": "a reboot, a return to service, another device, or a passed check (event `checked`)",
    "replace": "another device, or a passed check (event `checked`)",
}


def _some(told: list[str], most: int = 6) -> list[str]:
    return told if len(told) <= most else [*told[:most], f"and {len(told) - most} more"]


def _told(fault: NodeFault, now_s: float, cleared: bool = False) -> str:
    where = "" if fault.gpu is None else f"GPU {fault.gpu}: "
    times = f", {fault.num_times:.0f} times" if fault.num_times > 1 else ""
    done = ", cleared since" if cleared else ""
    return f"{where}{fault.description}, {_ago(now_s - fault.last_s)} ago{times}{done}"


def _sign(sign: NodeAnomaly) -> str:
    return sign.description if sign.gpu is None else f"GPU {sign.gpu}: {sign.description}"


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return "less than a minute"


def group_by_node(
    found: Iterable[NodeFault | NodeAnomaly],
) -> dict[tuple[str, str], list[NodeFault | NodeAnomaly]]:
    """Sort faults or signs by node."""
    of: dict[tuple[str, str], list[NodeFault | NodeAnomaly]] = defaultdict(list)
    for one in found:
        of[one.cluster, one.node].append(one)
    return of


def format_action(node: NodeHealth) -> str:
    """Return the one line that a screen has for a node."""
    if node.action == "drain" and node.is_out:
        return f"is out already: {node.action_text or REPAIR_STEPS['replace']}"
    return {"drain": f"drain; {node.action_text}", "check": node.action_text}.get(
        node.action, node.action_text
    )
