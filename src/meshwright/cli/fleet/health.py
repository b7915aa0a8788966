"""`mw fleet health`: which nodes to drain, check or watch, why, and what clears that."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.cli.flags.time_range import add_times
from meshwright.cli.fleet.flags import add_store, open_store, read_scope
from meshwright.cli.result import CommandResult, NoteView, View, make_fields, make_table
from meshwright.errors import InputError, Problem
from meshwright.fleet.health.alerts import list_alerts, render_rules
from meshwright.fleet.health.assessment import FleetHealth, assess_fleet
from meshwright.fleet.health.dashboards import render_dashboards
from meshwright.fleet.health.hooks.hook_files import HOOK_KINDS, write_hooks
from meshwright.fleet.health.score import ACTION_ORDER, NodeHealth, format_action
from meshwright.fleet.health.xids import REPAIR_STEPS, advise_xid, find_xid
from meshwright.fleet.sources.prometheus.promql_text import check_label
from meshwright.fleet.time_format import format_range
from meshwright.spec.name_suggestions import build_unknown_name_problem
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
        "--hooks", choices=HOOK_KINDS, help="write checks of nodes: Slurm's prolog and epilog, or "
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


def run(args: argparse.Namespace) -> CommandResult:
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
        scope = read_scope(store, args)
        health = assess_fleet(store, scope.since_s, scope.until_s, args.cluster)
    if args.node:
        health = _only(health, args.node)
    data = _data(health)
    quiet = tuple(f"{one.node}\t{one.action}\t{_score(one)}" for one in health.nodes)
    views = _details(health) if args.node else _screen(health, top)
    return CommandResult("fleet-health/2", data, views, quiet)


def _only(health: FleetHealth, name: str) -> FleetHealth:
    found = tuple(one for one in health.nodes if one.node == name)
    if not found:
        known = [one.node for one in health.nodes]
        raise InputError([build_unknown_name_problem("node", name, known, "--node")])
    return health._replace(nodes=found)


def _score(node: NodeHealth) -> str:
    return "?" if node.score is None else f"{node.score:.0f}"


def _data(health: FleetHealth) -> dict[str, Any]:
    return {
        "since_s": health.since_s,
        "until_s": health.until_s,
        "nodes": [
            {
                "cluster": one.cluster, "node": one.node, "score": one.score,
                "action": one.action, "reasons": list(one.reasons), "action_text": one.action_text,
                "cleared_by": one.cleared_by, "state": one.state or None, "is_lemon": one.is_lemon,
                "faults": [
                    {
                        "gpu": fault.gpu, "kind": fault.kind, "code": fault.code,
                        "first_s": fault.first_s, "last_s": fault.last_s, "count": fault.num_times,
                        "action": fault.advice.action, "repair": fault.advice.repair or None,
                        "text": fault.text,
                    }
                    for fault in one.faults
                ],
            }
            for one in health.nodes
        ],
        "application_xids": health.num_application_xids,
    }  # fmt: skip


def _screen(health: FleetHealth, top: int) -> tuple[View, ...]:
    count = {action: len(health.select_by_action(action)) for action in ACTION_ORDER}
    told = ", ".join(f"{number} {action}" for action, number in count.items() if number)
    out = sum(one.is_out for one in health.select_by_action("drain"))
    head = make_fields(
        {
            "time": format_range(health.since_s, health.until_s),
            "nodes": f"{len(health.nodes)}: {told}" if health.nodes else "none are known",
            "drained": f"{out} of {count['drain']} already" if count["drain"] else "",
            "programs": f"{health.num_application_xids:,} Xids that programs caused: no fault of "
                        f"any node"
            if health.num_application_xids else "",
        }
    )  # fmt: skip
    listed = [one for one in health.nodes if one.action != "ok"]
    rows = [
        (one.node, _score(one), one.action, one.state, one.reasons[0] if one.reasons else "",
         format_action(one))
        for one in listed[:top]
    ]  # fmt: skip
    views: list[View] = [head]
    if rows:
        views.append(make_table("node, score, advice, state, why, to do", rows, right="score",
                           wide="why, to do"))  # fmt: skip
        views.append(
            NoteView(f"all reasons, what clears them: mw fleet health --node {rows[0][0]}")
        )
    if len(listed) > top:
        views.append(NoteView(f"{len(listed) - top} more: --top {len(listed)}"))
    if health.nodes and not listed:
        views.append(NoteView("nothing speaks against any node"))
    return tuple(views)


def _details(health: FleetHealth) -> tuple[View, ...]:
    return tuple(
        make_fields(
            {
                "score": _score(one),
                "advice": one.action,
                "state": one.state,
                "why": "\n".join(one.reasons),
                "to do": format_action(one),
                "clears": one.cleared_by,
            },
            f"{one.node} ({one.cluster})",
        )
        for one in health.nodes
    )


def _xid(code: int) -> CommandResult:
    """Tell what one number means."""
    known, verdict = find_xid(code), advise_xid(code)
    data = {
        "code": code, "origin": known.origin, "meaning": known.meaning,
        "immediate_action": known.immediate_action or None,
        "followup_action": known.followup_action or None, "action": verdict.action,
        "repair": verdict.repair or None,
    }  # fmt: skip
    drain = {"none": "nothing speaks against the node", "watch": "keep the node, and watch it"}
    view = make_fields(
        {
            "means": known.meaning,
            "at fault": known.origin,
            "NVIDIA, now": known.immediate_action,
            "NVIDIA, if it returns": known.followup_action,
            "here": drain.get(verdict.action, f"drain the node; {REPAIR_STEPS[verdict.repair]}"),
        },
        f"Xid {code}",
    )
    return CommandResult("fleet-xid/2", data, (view,), (verdict.action,))


def _written(args: argparse.Namespace) -> CommandResult:
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
        notes.append(NoteView(_NEXT[args.hooks].format(folder=Path(args.out).absolute())))
    if args.rules:
        path = Path(args.rules)
        files += _write(path.parent, {path.name: render_rules()})
        notes.append(
            NoteView(f"{len(list_alerts())} alerts; check them: promtool check rules {args.rules}")
        )
    if args.dashboards:
        _require_label(args.node_label)
        files += _write(Path(args.dashboards), render_dashboards(args.node_label))
    views: tuple[View, ...] = (make_table("file", [(file,) for file in files]), *notes)
    return CommandResult("fleet-health-files/1", {"files": files}, views, tuple(files))


_NEXT = {
    "slurm": "in slurm.conf: Prolog={folder}/prolog.sh Epilog={folder}/epilog.sh; "
    "settings are in {folder}/health.conf",
    "kubernetes": "kubectl apply -f {folder}/configmap.yaml, mount it in node-problem-detector and "
    "add --config.custom-plugin-monitor and --config.system-log-monitor with the two files",
}


def _require_label(name: str) -> None:
    try:
        check_label(name)
    except ValueError as error:
        fix = "use letters, digits and underscores, such as Hostname or instance"
        raise InputError([Problem("--node-label", str(error), fix)]) from None


def _write(folder: Path, texts: Mapping[str, str]) -> list[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"cannot write: {error.strerror or error}"
        raise InputError([Problem(str(folder), what, "name another place")]) from None
    return [str(folder / name) for name in texts]
