"""An engine tells whose adapters its requests use, and how large its cache is."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")

from meshwright.run.serve.asked import Ask, Sampling
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.loop import EngineLoop
from meshwright.run.serve.model.lora import Adapters
from meshwright.run.serve.routed import gauges_of
from tests.run.serve.engine.small import Heard, engine_of, run_out
from tests.run.serve.model.small import small


def adapted(**given: Any) -> Engine:
    """Return an engine with two adapters that change nothing."""
    engine = engine_of(small(), **given)
    adapters = Adapters(engine.runner.forward, slots=2, rank=2)
    adapters.names.update(poet=0, clerk=1)
    engine.runner.adapters = adapters
    return engine


def ask(engine: Engine, adapter: str | None, choices: int = 1) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=6, n=choices)
    engine.add(Ask(prompt=(5, 6, 7), sampling=sampling, adapter=adapter), Heard())


def told(engine: Engine) -> tuple[tuple[str, ...], tuple[str, ...]]:
    gauges = engine.gauges()
    return gauges.running_adapters, gauges.waiting_adapters


def test_adapters_of_requests_that_run_and_that_wait_are_told() -> None:
    engine = adapted(batch_requests=1)
    assert told(engine) == ((), ())
    ask(engine, "poet")
    ask(engine, "clerk")
    ask(engine, None)
    assert told(engine) == ((), ("clerk", "poet"))
    engine.turn()
    assert told(engine) == (("poet",), ("clerk",))
    run_out(engine)
    assert told(engine) == ((), ())


def test_several_answers_of_one_request_wait_as_one() -> None:
    engine = adapted(batch_requests=4)
    ask(engine, "poet", choices=3)
    engine.turn()
    assert told(engine) == (("poet",), ())
    run_out(engine)
    assert told(engine) == ((), ())


def test_the_cache_of_engines_together_is_as_large_as_theirs() -> None:
    engines = adapted(), engine_of(small(), blocks=32)
    one = engines[0].gauges()
    assert (one.blocks, one.block_tokens, one.prefix_cache) == (64, 4, True)
    both = gauges_of([EngineLoop(engine) for engine in engines])
    assert (both.blocks, both.block_tokens, both.prefix_cache) == (96, 4, True)
