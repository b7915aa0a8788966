"""An engine tells whose adapters its requests use, and how large its cache is."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")

from meshwright.run.serve.client.routed_client import combine_stats
from meshwright.run.serve.client.thread_client import ThreadEngineClient
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.model.lora import LoRAManager
from meshwright.run.serve.request import Request
from meshwright.run.serve.sampling_params import SamplingParams
from tests.run.serve.engine.small import Heard, engine_of, run_out
from tests.run.serve.model.small import small


def adapted(**given: Any) -> Engine:
    """Return an engine with two adapters that change nothing."""
    engine = engine_of(small(), **given)
    adapters = LoRAManager(engine.runner.model, slots=2, max_lora_rank=2)
    adapters.slots_by_name.update(poet=0, clerk=1)
    engine.runner.lora_manager = adapters
    return engine


def ask(engine: Engine, adapter: str | None, choices: int = 1) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=6, n=choices)
    engine.add_request(
        Request(prompt_token_ids=(5, 6, 7), sampling_params=sampling, lora_name=adapter), Heard()
    )


def told(engine: Engine) -> tuple[tuple[str, ...], tuple[str, ...]]:
    gauges = engine.stats()
    return gauges.running_adapters, gauges.waiting_adapters


def test_adapters_of_requests_that_run_and_that_wait_are_told() -> None:
    engine = adapted(max_num_seqs=1)
    assert told(engine) == ((), ())
    ask(engine, "poet")
    ask(engine, "clerk")
    ask(engine, None)
    assert told(engine) == ((), ("clerk", "poet"))
    engine.step()
    assert told(engine) == (("poet",), ("clerk",))
    run_out(engine)
    assert told(engine) == ((), ())


def test_several_answers_of_one_request_wait_as_one() -> None:
    engine = adapted(max_num_seqs=4)
    ask(engine, "poet", choices=3)
    engine.step()
    assert told(engine) == (("poet",), ())
    run_out(engine)
    assert told(engine) == ((), ())


def test_the_cache_of_engines_together_is_as_large_as_theirs() -> None:
    engines = adapted(), engine_of(small(), blocks=32)
    one = engines[0].stats()
    assert (one.num_gpu_blocks, one.block_size, one.enable_prefix_caching) == (64, 4, True)
    both = combine_stats([ThreadEngineClient(engine) for engine in engines])
    assert (both.num_gpu_blocks, both.block_size, both.enable_prefix_caching) == (96, 4, True)
