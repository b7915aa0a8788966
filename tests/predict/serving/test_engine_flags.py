import argparse
import shlex

import pytest

from meshwright.cli import serve
from meshwright.predict.serving.engine import MESHWRIGHT
from meshwright.predict.serving.engine_flags import command_lines
from meshwright.predict.serving.fleet import Copies, Fleet, default_limits
from meshwright.predict.serving.formats import Formats
from meshwright.predict.serving.replica import Replica
from meshwright.spec import catalog
from meshwright.spec.layout import Layout


def copies(count: int, tp: int = 2) -> Copies:
    replica = Replica(
        model=catalog.model("llama3.1-8b"),
        cluster=catalog.cluster("h200-superpod"),
        layout=Layout(tp=tp),
        formats=Formats(weights="fp8", kv="fp8"),
        engine=MESHWRIGHT,
    )
    limits = default_limits(replica, batch_requests=128, prefix_cache=False)
    return Copies(replica=replica, limits=limits, count=count)


@pytest.mark.parametrize("apart", [False, True])
def test_our_own_command_is_one_that_we_understand(apart: bool) -> None:
    fleet = Fleet(serving=copies(3), prefill=copies(1) if apart else None, routing="prefix")
    (line,) = command_lines(fleet, "meshwright", "path/of/model").lines
    parser = argparse.ArgumentParser()
    serve.configure(parser)
    asked = parser.parse_args(shlex.split(line)[2:])
    assert asked.tp == "2"
    assert (asked.weights, asked.kv) == ("fp8", "fp8")
    assert asked.batch_requests == "128"
    if apart:
        assert (asked.prefill, asked.decode) == ("1", "3")
    else:
        assert (asked.replicas, asked.routing) == ("3", "prefix")


def test_what_our_own_engine_cannot_do_is_said() -> None:
    fleet = Fleet(serving=copies(1), prefill=copies(1, tp=4))
    (note,) = command_lines(fleet, "meshwright", "m").notes
    assert "same tp" in note
