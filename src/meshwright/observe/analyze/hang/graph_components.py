"""The last components of a directed graph: sets of nodes that reach each other and nothing else."""

from collections.abc import Collection, Mapping


def find_sink_components(  # noqa: C901 - Tarjan's loop, kept in one piece
    edges: Mapping[int, Collection[int]],
) -> list[tuple[int, ...]]:
    """Return the strongly connected components without a way out (Tarjan 1972, no recursion)."""
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    component: dict[int, int] = {}
    for root in edges:
        if root in number:
            continue
        work = [(root, iter(edges[root]))]
        number[root] = low[root] = len(number)
        stack.append(root)
        while work:
            node, ahead = work[-1]
            following = next(ahead, None)
            if following is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == number[node]:
                    while True:
                        member = stack.pop()
                        component[member] = node
                        if member == node:
                            break
            elif following not in number:
                number[following] = low[following] = len(number)
                stack.append(following)
                work.append((following, iter(edges[following])))
            elif following not in component:
                low[node] = min(low[node], number[following])
    leaving = {
        component[node] for node in edges for to in edges[node] if component[to] != component[node]
    }
    found: dict[int, list[int]] = {}
    for node, name in component.items():
        if name not in leaving:
            found.setdefault(name, []).append(node)
    return [tuple(sorted(nodes)) for nodes in found.values()]
