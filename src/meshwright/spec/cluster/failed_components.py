"""Parts taken out of a `LinkGraph`, and GPUs that are cut off by it.

`remove_components` gives the graph that is left; `require_connected` names GPUs that cannot reach
the others, or cannot be reached by them. A collective over such GPUs is impossible, whoever plans
it.
"""

from collections.abc import Sequence

from meshwright.errors import InputError, Problem
from meshwright.spec.cluster.link_graph import LinkGraph
from meshwright.spec.name_suggestions import build_unknown_name_problem

_ARROWS = ("→", "->")
_BOTH = "~"
_NAMED = 8


def remove_components(graph: LinkGraph, dead: Sequence[str]) -> LinkGraph:
    """Return a graph without some of its parts; every GPU that is left must reach every other.

    A part is a vertex (a GPU, card or switch) or a link: `a→b` in that direction, `a~b` (a switch
    port, a cable) in both.
    """
    names = {vertex.name for vertex in graph.vertices}
    known = {(link.source, link.target) for link in graph.links}
    gone: set[str] = set()
    cut: set[tuple[str, str]] = set()
    problems = []
    for part in dead:
        links = _links(part)
        if not links:
            gone.add(part)
            problems += (
                [] if part in names else [build_unknown_name_problem("part", part, names, "dead")]
            )
        elif not links & known:
            source, target = _ends(part)
            near = sorted(b for a, b in known if a == source) or sorted(names)
            fix = f"{source} is linked to {', '.join(near[:_NAMED])}"
            problems.append(Problem("dead", f"{source} and {target} are not linked", fix))
        cut |= links
    if problems:
        raise InputError(problems)
    left = LinkGraph(
        vertices=tuple(vertex for vertex in graph.vertices if vertex.name not in gone),
        links=tuple(
            link
            for link in graph.links
            if (link.source, link.target) not in cut and not {link.source, link.target} & gone
        ),
    )
    require_connected(left)
    return left


def _links(part: str) -> set[tuple[str, str]]:
    """Return the links that a part names; none if it names a vertex."""
    ends = _ends(part)
    if not ends[1]:
        return set()
    return {ends, ends[::-1]} if _BOTH in part else {ends}


def _ends(part: str) -> tuple[str, str]:
    for sign in (*_ARROWS, _BOTH):
        if sign in part:
            source, _, target = part.partition(sign)
            return source.strip(), target.strip()
    return part, ""


def require_connected(graph: LinkGraph, gpus: Sequence[str] | None = None) -> None:
    """Raise if some of the GPUs (all, where None) cannot reach the others, and name them.

    GPUs that take no part pass nothing on. Of two sides the smaller one is said to be cut off.
    """
    every = [vertex.name for vertex in graph.vertices_of_kind("gpu")]
    members = every if gpus is None else list(gpus)
    if not members:
        raise InputError([Problem("graph", "the graph has no GPU", "add at least one")])
    outside = set(every) - set(members)
    after: dict[str, list[str]] = {}
    before: dict[str, list[str]] = {}
    for link in graph.links:
        if not {link.source, link.target} & outside:
            after.setdefault(link.source, []).append(link.target)
            before.setdefault(link.target, []).append(link.source)
    for links in (after, before):
        reached = _reached(members[0], links)
        lost = [gpu for gpu in members if gpu not in reached]
        if lost:
            found = [gpu for gpu in members if gpu in reached]
            few = min(lost, found, key=len)
            raise InputError([_cut_off(few, len(members) - len(few), after, before)])


def _cut_off(
    few: list[str], others: int, after: dict[str, list[str]], before: dict[str, list[str]]
) -> Problem:
    """Say who is cut off, and what is left on their side."""
    side: set[str] = set()
    for gpu in few:
        side |= _reached(gpu, after) & _reached(gpu, before)
    around = sorted(side - set(few))
    if around:
        left = f"only {', '.join(around[:_NAMED])} on that side"
    elif any(gpu in links for gpu in few for links in (after, before)):
        left = "no link leads across, or only one way"
    else:
        left = "no link is left there"
    more = f" and {len(few) - _NAMED} more" if len(few) > _NAMED else ""
    verb = "is" if len(few) == 1 else "are"
    what = f"{', '.join(few[:_NAMED])}{more} {verb} cut off from the other {others} GPUs: {left}"
    fix = "mend a link, or leave these GPUs out"
    return Problem("graph", what, fix)


def _reached(start: str, links: dict[str, list[str]]) -> set[str]:
    """Return every vertex that links lead to."""
    found, left = {start}, [start]
    while left:
        for other in links.get(left.pop(), ()):
            if other not in found:
                found.add(other)
                left.append(other)
    return found
