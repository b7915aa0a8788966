"""`mw fleet health`: which nodes to drain, check or watch, why, and what clears that."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.cli.answer import Answer, Note, View, facts, table
from meshwright.cli.fleet_account import asked
from meshwright.cli.fleet_store import add_store, open_store
from meshwright.cli.fleet_times import add_times, stretch
from meshwright.errors import InputError, Problem
from meshwright.observe.fleet.health.alerts import alerts, rules
from meshwright.observe.fleet.health.dashboards import dashboards
from meshwright.observe.fleet.health.examine import Health, examine
from meshwright.observe.fleet.health.hooks import KINDS, write_hooks
from meshwright.observe.fleet.health.score import ORDER, Node, todo_line
from meshwright.observe.fleet.health.xids import MENDED, judge, xid
from meshwright.spec.names import unknown_name
from meshwright.spec.units import parse_count

EXAMPLES = (
    "mw fleet health",
    "mw fleet health --node gpu-17",
    "mw fleet health --xid 79",
    "mw fleet health --hooks slurm --out /etc/slurm/health",
    "mw fleet health --rules gpu-health.yml --dashboards grafana/",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_times(parser, "30d")
    parser.add_argument("--node", metavar="NAME", help="only this one, with all reasons")
    parser.add_argument("--cluster", metavar="NAME", help="only this one")
    parser.add_argument("--top", default="25", metavar="N", help="how many nodes (default: 25)")
    parser.add_argument("--xid", metavar="N", help="say what this Xid means and calls for")
    made = parser.add_argument_group("files for other programs (no store is read)")
    made.add_argument(
        "--hooks", choices=KINDS, help="write checks of nodes: Slurm's prolog and epilog, or "
        "node-problem-detector's plugin",
    )  # fmt: skip
    made.add_argument("--out", metavar="DIR", help="where hooks go")
    made.add_argument(
        "--drain", action="store_true",
        help="let Slurm's hooks drain unfit nodes; else they only log what they find",
    )  # fmt: skip
    made.add_argument("--rules", metavar="FILE", help="write alert rules for Prometheus")
    made.add_argument("--dashboards", metavar="DIR", help="write dashboards for Grafana")
    made.add_argument(
        "--node-label", default="Hostname", metavar="NAME",
        help="label by which dashboards tell nodes apart (default: Hostname)",
    )  # fmt: skip
    add_store(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with the health of a fleet, one Xid, or the files that were written."""
    if args.xid is not None:
        return _xid(parse_count(args.xid, "--xid"))
    if args.hooks or args.rules or args.dashboards:
        return _written(args)
    for flag, needs in (("out", "--hooks"), ("drain", "--hooks slurm")):
        if getattr(args, flag):
            raise InputError([Problem(f"--{flag}", "has nothing to do here", f"add {needs}")])
    top = parse_count(args.top, "--top")
    with open_store(args) as store:
        scope = asked(store, args)
        health = examine(store, scope.since_s, scope.until_s, args.cluster)
    if args.node:
        health = _only(health, args.node)
    data = _data(health)
    quiet = tuple(f"{one.node}\t{one.action}\t{_score(one)}" for one in health.nodes)
    views = _details(health) if args.node else _screen(health, top)
    return Answer("fleet-health/1", data, views, quiet)


def _only(health: Health, name: str) -> Health:
    found = tuple(one for one in health.nodes if one.node == name)
    if not found:
        known = [one.node for one in health.nodes]
        raise InputError([unknown_name("node", name, known, "--node")])
    return health._replace(nodes=found)


def _score(node: Node) -> str:
    return "?" if node.score is None else f"{node.score:.0f}"


def _data(health: Health) -> dict[str, Any]:
    return {
        "since_s": health.since_s,
        "until_s": health.until_s,
        "nodes": [
            {
                "cluster": one.cluster, "node": one.node, "score": one.score,
                "action": one.action, "reasons": list(one.reasons), "todo": one.todo,
                "clears": one.clears, "state": one.state or None, "lemon": one.lemon,
                "faults": [
                    {
                        "gpu": fault.gpu, "kind": fault.kind, "code": fault.code,
                        "first_s": fault.first_s, "last_s": fault.last_s, "count": fault.times,
                        "step": fault.verdict.step, "mend": fault.verdict.mend or None,
                        "text": fault.text,
                    }
                    for fault in one.faults
                ],
            }
            for one in health.nodes
        ],
        "application_xids": health.programs,
    }  # fmt: skip


def _screen(health: Health, top: int) -> tuple[View, ...]:
    count = {action: len(health.of(action)) for action in ORDER}
    told = ", ".join(f"{number} {action}" for action, number in count.items() if number)
    out = sum(one.is_out for one in health.of("drain"))
    head = facts(
        {
            "time": stretch(health.since_s, health.until_s),
            "nodes": f"{len(health.nodes)}: {told}" if health.nodes else "none are known",
            "drained": f"{out} of {count['drain']} already" if count["drain"] else "",
            "programs": f"{health.programs:,} Xids that programs caused: no fault of any node"
            if health.programs else "",
        }
    )  # fmt: skip
    listed = [one for one in health.nodes if one.action != "ok"]
    rows = [
        (one.node, _score(one), one.action, one.state, one.reasons[0] if one.reasons else "",
         todo_line(one))
        for one in listed[:top]
    ]  # fmt: skip
    views: list[View] = [head]
    if rows:
        views.append(table("node, score, advice, state, why, to do", rows, right="score",
                           wide="why, to do"))  # fmt: skip
        views.append(Note(f"all reasons, what clears them: mw fleet health --node {rows[0][0]}"))
    if len(listed) > top:
        views.append(Note(f"{len(listed) - top} more: --top {len(listed)}"))
    if health.nodes and not listed:
        views.append(Note("nothing speaks against any node"))
    return tuple(views)


def _details(health: Health) -> tuple[View, ...]:
    return tuple(
        facts(
            {
                "score": _score(one),
                "advice": one.action,
                "state": one.state,
                "why": "\n".join(one.reasons),
                "to do": todo_line(one),
                "clears": one.clears,
            },
            f"{one.node} ({one.cluster})",
        )
        for one in health.nodes
    )


def _xid(code: int) -> Answer:
    """Tell what one number means."""
    known, verdict = xid(code), judge(code)
    data = {
        "code": code, "fault": known.fault, "meaning": known.meaning, "now": known.now or None,
        "then": known.then or None, "step": verdict.step, "mend": verdict.mend or None,
    }  # fmt: skip
    drain = {"none": "nothing speaks against the node", "watch": "keep the node, and watch it"}
    view = facts(
        {
            "means": known.meaning,
            "at fault": known.fault,
            "NVIDIA, now": known.now,
            "NVIDIA, if it returns": known.then,
            "here": drain.get(verdict.step, f"drain the node; {MENDED[verdict.mend]}"),
        },
        f"Xid {code}",
    )
    return Answer("fleet-xid/1", data, (view,), (verdict.step,))


def _written(args: argparse.Namespace) -> Answer:
    files: list[str] = []
    notes: list[View] = []
    if args.hooks:
        if not args.out:
            fix = "add --out DIR"
            raise InputError([Problem("--hooks", "nobody said where hooks are to be written", fix)])
        if args.drain and args.hooks != "slurm":
            fix = "leave it out; conditions of nodes are acted upon by what watches them"
            raise InputError([Problem("--drain", "is for --hooks slurm", fix)])
        files += map(str, write_hooks(args.hooks, Path(args.out), drain=args.drain))
        notes.append(Note(_NEXT[args.hooks].format(folder=Path(args.out).absolute())))
    if args.rules:
        path = Path(args.rules)
        files += _write(path.parent, {path.name: rules()})
        notes.append(Note(f"{len(alerts())} alerts; check them: promtool check rules {args.rules}"))
    if args.dashboards:
        files += _write(Path(args.dashboards), dashboards(args.node_label))
    views: tuple[View, ...] = (table("file", [(file,) for file in files]), *notes)
    return Answer("fleet-health-files/1", {"files": files}, views, tuple(files))


_NEXT = {
    "slurm": "in slurm.conf: Prolog={folder}/prolog.sh Epilog={folder}/epilog.sh; "
    "settings are in {folder}/health.conf",
    "kubernetes": "kubectl apply -f {folder}/configmap.yaml, mount it in node-problem-detector and "
    "add --config.custom-plugin-monitor and --config.system-log-monitor with the two files",
}


def _write(folder: Path, texts: Mapping[str, str]) -> list[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        raise InputError([Problem(str(folder), what, "name another place")]) from None
    return [str(folder / name) for name in texts]
