"""`mw collective export`: an algorithm for MSCCL or MSCCL++, or a tuner file for NCCL itself."""

import argparse

from meshwright.cli.collective.explain import (
    add_nccl,
    make_full_placement,
    parse_nccl_op,
    read_allowed_algorithms,
)
from meshwright.cli.collective.flags import (
    add_algorithm,
    add_cluster,
    build_collective,
    read_target,
)
from meshwright.cli.parser import add_common
from meshwright.cli.render.files import write_text
from meshwright.cli.result import CommandResult, NoteView, TextView, View
from meshwright.errors import InputError, Problem
from meshwright.policy.collective.collective import SEPARATE_OUTPUT_OPS
from meshwright.policy.collective.formats import (
    write_collective_json,
    write_msccl_xml,
    write_mscclpp_json,
)
from meshwright.policy.collective.formats.mscclpp_json import Buffers
from meshwright.predict.network.nccl_constants import ALGORITHMS, PROTOCOLS
from meshwright.predict.network.tuner.nccl_tests import read_nccl_tests, to_tuning_sweep
from meshwright.predict.network.tuner.tuner_csv import check_tuner_rows, write_tuner_csv
from meshwright.predict.network.tuner.tuner_rows import build_measured_rows, build_predicted_rows
from meshwright.predict.network.tuner.tuning_sweep import CollectiveTiming, read_training_csv
from meshwright.spec.file_formats import read_text
from meshwright.spec.units import parse_count

EXAMPLES = (
    "mw collective export ring --ranks 8 --to msccl-xml > ring.xml",
    "mw collective export two_shot --ranks 8 --to mscclpp-json --out direct.json",
    "mw collective export --to nccl-tuner --cluster h100-superpod --gpus 16 --out tuner.csv",
    "mw collective export --to nccl-tuner --measured ring/simple/16=ring.log "
    "--measured tree/ll/16=tree.log",
)
EXPORT_FORMATS = ("msccl-xml", "mscclpp-json", "json", "nccl-tuner")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_algorithm(parser, optional=True)
    parser.add_argument("--to", choices=EXPORT_FORMATS, required=True, help="what to write")
    parser.add_argument("--out", metavar="FILE", help="where to write it (default: print it)")
    parser.add_argument("--measured", metavar="FILE", action="append", default=[],
                        help="for nccl-tuner: a sweep in the training format of NCCL's tuner, or "
                        "ring/simple/16=FILE: what nccl-tests printed with that algorithm, "
                        "protocol and channels (several times)")  # fmt: skip
    parser.add_argument("--buffers", choices=("same", "apart"), default="same",
                        help="for mscclpp-json: are input and output one buffer?")  # fmt: skip
    add_nccl(parser)
    add_cluster(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with the file, or write it."""
    if args.to == "nccl-tuner":
        if args.name is not None:
            what = "a tuner file chooses among NCCL's own algorithms"
            raise InputError([Problem("ALGORITHM", what, "leave it out, or restrict with --only")])
        text, notes = _tuner(args)
    elif args.name is None:
        fix = f"mw collective export ring --to {args.to}"
        raise InputError([Problem("ALGORITHM", f"{args.to} needs an algorithm", fix)])
    else:
        text, notes = _algorithm(args)
    data = {"target": args.to, "file": args.out, "text": text}
    if args.out is None:
        return CommandResult(
            "collective.export/1",
            data,
            (TextView(text, verbatim=True), *notes),
            (text.rstrip("\n"),),
        )
    write_text(args.out, text)
    shown: View = TextView(f"wrote {args.out}")
    return CommandResult("collective.export/1", data, (shown, *notes), (args.out,))


def _algorithm(args: argparse.Namespace) -> tuple[str, tuple[View, ...]]:
    on = read_target(args, needed=False)
    found = build_collective(args, on)
    if args.to == "json":
        return write_collective_json(found), ()
    if args.to == "msccl-xml":
        note = NoteView("run it with the MSCCL executor: MSCCL_ALGO_DIR is the folder it lies in")
        hosted = NoteView("sums in switches become sums on ranks here") if found.switches else None
        return write_msccl_xml(found), (note, *([hosted] if hosted else []))
    per_node = None if args.per_node is None else parse_count(args.per_node, "--per-node")
    apart = args.buffers == "apart" or found.op in SEPARATE_OUTPUT_OPS
    buffers: Buffers = "out_of_place" if apart else "in_place"
    return write_mscclpp_json(found, per_node=per_node, buffers=buffers), ()


def _tuner(args: argparse.Namespace) -> tuple[str, tuple[View, ...]]:
    if args.measured:
        rows = build_measured_rows([one for given in args.measured for one in _sweep(given, args)])
        remark = f"fastest of the measurements in {', '.join(args.measured)}"
    else:
        on = read_target(args)
        assert on is not None
        place = make_full_placement(on)
        only = read_allowed_algorithms(args)
        rows = build_predicted_rows([place], nccl=args.nccl, collnet=args.collnet, only=only)
        remark = f"predicted for {on.gpus} GPUs of {on.cluster.name}, NCCL {args.nccl}"
    text = write_tuner_csv(rows, [remark])
    notes: list[View] = [NoteView(str(problem)) for problem in check_tuner_rows(rows)]
    notes.append(
        NoteView(
            "load it with NCCL_TUNER_PLUGIN=libnccl-tuner-example.so NCCL_TUNER_CONFIG_FILE=FILE"
        )
    )
    return text, tuple(notes)


def _sweep(given: str, args: argparse.Namespace) -> tuple[CollectiveTiming, ...]:
    """Read one sweep: a training file, or a log of nccl-tests with what it was restricted to."""
    setting, _, path = given.rpartition("=")
    if not setting:
        return read_training_csv(read_text(path), path)
    words = [word.strip().lower() for word in setting.split("/")]
    algorithm = next((name for name in ALGORITHMS if words[0] == name), None)
    protocol = next((name for name in PROTOCOLS if len(words) > 1 and words[1] == name), None)
    if len(words) != 3 or algorithm is None or protocol is None:
        what = f"{setting!r} does not say algorithm, protocol and channels"
        fix = "write them as in ring/simple/16=ring.log"
        raise InputError([Problem("--measured", what, fix)])
    run = read_nccl_tests(read_text(path), path)
    try:
        return to_tuning_sweep(
            [run],
            algorithm=algorithm,
            protocol=protocol,
            channels=parse_count(words[2], "--measured"),
            op=None if args.op is None else parse_nccl_op(args.op),
            nodes=None if args.nodes is None else parse_count(args.nodes, "--nodes"),
            ranks=None if args.ranks is None else parse_count(args.ranks, "--ranks"),
        )
    except InputError as error:
        raise InputError(
            problem._replace(where=path, fix=problem.fix.replace("give ", "give it with --"))
            for problem in error.problems
        ) from None
