"""A ready message to each owner: what was seen, what it costs, what to change."""

from collections.abc import Iterable

from meshwright.fleet.patterns.evidence_text import format_hours
from meshwright.fleet.patterns.finding import OPERATOR_OWNER, UNKNOWN_OWNER, FleetFinding

MAX_JOBS = 10


def write_owner_report(owner: str, found: Iterable[FleetFinding], period: str) -> str:
    """One message about everything that one owner can change, costliest first."""
    own = sorted(found, key=lambda one: -(one.gpu_hours or 0.0))
    total = sum(one.gpu_hours or 0.0 for one in own)
    money = [one.dollars for one in own if one.dollars is not None]
    worth = f", about ${sum(money):,.0f}" if money else ""
    cost = f"{format_hours(total)} GPU-hours{worth}" if total else "no GPU-hours, but time"
    subject = own[0].title if len(own) == 1 else f"{len(own)} ways to save GPU-hours"
    lines = [
        f"To: {owner}",
        f"Subject: {subject} ({cost}, {period})",
        "",
        f"Hello {owner},",
        "",
        f"during {period} we saw the following, which together cost {cost}:",
    ]
    for number, one in enumerate(own, start=1):
        lines += ["", f"{number}. {one.title}{_price(one)}"]
        lines += [f"   - {line}" for line in one.evidence]
        if one.owner == UNKNOWN_OWNER:
            lines.append("   - no owner is known: no source told whose jobs these are")
        if one.jobs and len(one.jobs) > 1:
            more = len(one.jobs) - MAX_JOBS
            shown = ", ".join(one.jobs[:MAX_JOBS]) + (f" and {more} more" if more > 0 else "")
            lines.append(f"   - jobs: {shown}")
        lines += [f"   What to change: {one.remedy}", f"   How it is counted: {one.cost_basis}"]
    lines += [
        "",
        "If one of these is as it should be, answer this message and say why: it will be left out.",
    ]
    return "\n".join(lines) + "\n"


def write_owner_reports(found: Iterable[FleetFinding], period: str) -> dict[str, str]:
    """A message for each owner; the operators get what has none that is known."""
    by_owner: dict[str, list[FleetFinding]] = {}
    for one in found:
        by_owner.setdefault(OPERATOR_OWNER if one.owner == UNKNOWN_OWNER else one.owner, []).append(
            one
        )
    return {
        owner: write_owner_report(owner, own, period) for owner, own in sorted(by_owner.items())
    }


def _price(one: FleetFinding) -> str:
    if one.gpu_hours is None:
        return ""
    money = f", ${one.dollars:,.0f}" if one.dollars is not None else ""
    return f": {format_hours(one.gpu_hours)} GPU-hours{money}"
