"""A server holds nothing of the requests it has answered, seen from outside of its processes."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs a model")
pytest.importorskip("uvicorn", reason="the server needs meshwright[serve]")
pytest.importorskip("llguidance", reason="binds answers")

from benchmarks.serve_soak import SETUPS, soak, tiny_model


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")
@pytest.mark.parametrize("name", SETUPS)
def test_nothing_is_held_while_nobody_asks(name: str) -> None:
    seen = soak(tiny_model(), SETUPS[name][0], 2040, 12)
    assert not seen.wrong
    assert {held.open for held in seen.samples} == {(0.0, 0.0, 0.0, 0.0)}
    assert seen.more("files") <= 0
    assert seen.more("threads") <= 2  # a pool's come and go
