"""How sound each node is, what to do with it, why, and what would clear it.

The score is 100 × the product of (1 − w · 2^(−age / 7 days)) over a node's faults, times (1 − w)
for each way in which it differs from its peers. It is for ranking and for fading away; whether to
drain is not decided by it but by named faults, which stand until something clears them. The same
data gives the same advice, whenever it is asked for.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from meshwright.observe.fleet.health.clearing import Clearing
from meshwright.observe.fleet.health.faults import Fault
from meshwright.observe.fleet.health.peers import Sign
from meshwright.observe.fleet.health.xids import MENDED

Action = Literal["drain", "check", "watch", "ok", "unknown"]

HALF_LIFE_S: Final = 7 * 86_400.0
CLEARED: Final = 1 / 3
"""What is left of the weight of a fault that has been cleared."""
CHECK_BELOW: Final = 70.0
WATCH_BELOW: Final = 90.0
ORDER: Final[tuple[Action, ...]] = ("drain", "check", "watch", "unknown", "ok")
_CHECK: Final = "when it is next free: mw bench --quick --health, or dcgmi diag -r 2"
_SILENT: Final = "see whether the node is up, and its exporter runs"


class Node(NamedTuple):
    """The health of one node."""

    cluster: str
    node: str
    score: float | None
    """None: nothing is known of it."""
    action: Action
    reasons: tuple[str, ...]
    """Why, gravest first."""
    todo: str
    clears: str
    """What takes the advice back."""
    state: str
    """As the scheduler has it; empty: nobody tells."""
    lemon: bool
    faults: tuple[Fault, ...]
    signs: tuple[Sign, ...]

    @property
    def is_out(self) -> bool:
        """Whether the scheduler keeps jobs away already."""
        return self.state in ("down", "draining")


def score(faults: Iterable[tuple[Fault, bool]], signs: Iterable[Sign], now_s: float) -> float:
    """Return 0 to 100 from faults, each with whether it is cleared, and signs."""
    left = 1.0
    for fault, cleared in faults:
        age_s = max(0.0, now_s - fault.last_s)
        weight = fault.weight * 2.0 ** (-age_s / HALF_LIFE_S)
        left *= 1 - weight * (CLEARED if cleared else 1.0)
    for sign in signs:
        left *= 1 - sign.weight
    return 100.0 * left


def node_of(
    place: tuple[str, str],
    faults: tuple[Fault, ...],
    signs: tuple[Sign, ...],
    clearing: Clearing,
    now_s: float,
    *,
    incidents: int = 0,
    rate: float | None = None,
    known: bool = True,
) -> Node:
    """Judge one node; `rate` is what is usual of incidents where the node is a lemon."""
    state = clearing.state(place)
    if not known and not faults and not signs:
        why = ("no samples, events or jobs of it are known in this time",)
        return Node(*place, None, "unknown", why, "see that its exporters are scraped", "telemetry",
                    state, False, (), ())  # fmt: skip
    stands = [(fault, clearing.cleared(fault)) for fault in faults]
    points = score(stands, signs, now_s)
    open_ones = [fault for fault, done in stands if fault.verdict.step == "drain" and not done]
    lemon = rate is not None
    reasons = [_told(fault, now_s) for fault in reversed(open_ones)]
    if lemon:
        reasons.append(f"fails again and again: {incidents} incidents, {rate:.2g} are usual")
    if open_ones or lemon:
        worst = max(open_ones, key=lambda one: (_GRAVITY[one.verdict.mend], one.last_s),
                    default=None)  # fmt: skip
        todo, clears = (worst.todo, _CLEARS[worst.verdict.mend]) if worst else ("", "")
        if lemon:
            todo = f"{todo}; then burn it in (mw bench --burn-in 60)".lstrip("; ")
            clears = "a device that was exchanged, or a passed check (event `checked`)"
        action: Action = "drain"
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
    return Node(*place, points, action, tuple(reasons), todo, clears, state, lemon, faults, signs)


_GRAVITY: Final = {"": 0, "reset": 1, "reboot": 2, "replace": 3}
_CLEARS: Final = {
    "reset": "a reboot, a return to service, another device, or a passed check (event `checked`)",
    "reboot": "a reboot, a return to service, another device, or a passed check (event `checked`)",
    "replace": "another device, or a passed check (event `checked`)",
}


def _some(told: list[str], most: int = 6) -> list[str]:
    return told if len(told) <= most else [*told[:most], f"and {len(told) - most} more"]


def _told(fault: Fault, now_s: float, cleared: bool = False) -> str:
    where = "" if fault.gpu is None else f"GPU {fault.gpu}: "
    times = f", {fault.times:.0f} times" if fault.times > 1 else ""
    done = ", cleared since" if cleared else ""
    return f"{where}{fault.what}, {_ago(now_s - fault.last_s)} ago{times}{done}"


def _sign(sign: Sign) -> str:
    return sign.what if sign.gpu is None else f"GPU {sign.gpu}: {sign.what}"


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return "less than a minute"


def by_place(found: Iterable[Fault | Sign]) -> dict[tuple[str, str], list[Fault | Sign]]:
    """Sort faults or signs by node."""
    of: dict[tuple[str, str], list[Fault | Sign]] = defaultdict(list)
    for one in found:
        of[one.cluster, one.node].append(one)
    return of


def todo_line(node: Node) -> str:
    """Return the one line that a screen has for a node."""
    if node.action == "drain" and node.is_out:
        return f"is out already: {node.todo or MENDED['replace']}"
    return {"drain": f"drain; {node.todo}", "check": node.todo}.get(node.action, node.todo)
