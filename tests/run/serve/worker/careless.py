"""The process of a small engine that breaks when it is closed."""

import sys
from typing import NoReturn

from meshwright.run.serve.engine.doing import Doer
from meshwright.run.serve.engine.runner import Runner
from meshwright.run.serve.engine.start import Started
from meshwright.run.serve.engine.upkeep import Upkeep
from meshwright.run.serve.worker.frames import Start
from meshwright.run.serve.worker.process import main
from meshwright.run.serve.worker.worker import Perform, performer
from tests.run.serve.engine.small import engine_of
from tests.run.serve.model.small import small


def _break() -> NoReturn:
    raise RuntimeError("it changed while it was looked through")


def _begin(_: Start) -> tuple[Started, Perform]:
    engine = engine_of(small())
    assert isinstance(engine.runner, Runner)
    upkeep = Upkeep(engine, Doer(engine.runner, graphs=False, batch_tokens=24, rows=8))
    engine.close = _break  # type: ignore[method-assign]
    return Started(engine, upkeep, None, ()), performer(upkeep)


if __name__ == "__main__":
    main(sys.argv[1], _begin, _break)
