"""A ready message to each owner: what was seen, what it costs, what to change."""

from collections.abc import Iterable

from meshwright.observe.fleet.patterns.say import hours
from meshwright.observe.fleet.patterns.told import OPERATORS, UNKNOWN, Told

MOST_JOBS = 10


def letter(owner: str, found: Iterable[Told], period: str) -> str:
    """One message about everything that one owner can change, costliest first."""
    own = sorted(found, key=lambda one: -(one.gpu_hours or 0.0))
    total = sum(one.gpu_hours or 0.0 for one in own)
    money = [one.money for one in own if one.money is not None]
    worth = f", about ${sum(money):,.0f}" if money else ""
    cost = f"{hours(total)} GPU-hours{worth}" if total else "no GPU-hours, but time"
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
        if one.owner == UNKNOWN:
            lines.append("   - no owner is known: no source told whose jobs these are")
        if one.jobs and len(one.jobs) > 1:
            more = len(one.jobs) - MOST_JOBS
            shown = ", ".join(one.jobs[:MOST_JOBS]) + (f" and {more} more" if more > 0 else "")
            lines.append(f"   - jobs: {shown}")
        lines += [f"   What to change: {one.remedy}", f"   How it is counted: {one.cost}"]
    lines += [
        "",
        "If one of these is as it should be, answer this message and say why: it will be left out.",
    ]
    return "\n".join(lines) + "\n"


def letters(found: Iterable[Told], period: str) -> dict[str, str]:
    """A message for each owner; the operators get what has none that is known."""
    by_owner: dict[str, list[Told]] = {}
    for one in found:
        by_owner.setdefault(OPERATORS if one.owner == UNKNOWN else one.owner, []).append(one)
    return {owner: letter(owner, own, period) for owner, own in sorted(by_owner.items())}


def _price(one: Told) -> str:
    if one.gpu_hours is None:
        return ""
    money = f", ${one.money:,.0f}" if one.money is not None else ""
    return f": {hours(one.gpu_hours)} GPU-hours{money}"
