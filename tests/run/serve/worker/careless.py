"""The process of a small engine that breaks when it is closed."""

import sys
from typing import NoReturn

from meshwright.run.serve.engine.executor.rank_commands import ServingCommandHandler
from meshwright.run.serve.engine.lifecycle import EngineLifecycle
from meshwright.run.serve.engine.model_runner.model_runner import ModelRunner
from meshwright.run.serve.engine.startup import StartedEngine
from meshwright.run.serve.worker.engine_worker import UtilityHandler, create_utility_handler
from meshwright.run.serve.worker.protocol import StartEngine
from meshwright.run.serve.worker.worker_process import main
from tests.run.serve.engine.small import engine_of
from tests.run.serve.model.small import small


def _break() -> NoReturn:
    raise RuntimeError("it changed while it was looked through")


def _begin(_: StartEngine) -> tuple[StartedEngine, UtilityHandler]:
    engine = engine_of(small())
    assert isinstance(engine.runner, ModelRunner)
    upkeep = EngineLifecycle(
        engine, ServingCommandHandler(engine.runner, graphs=False, batch_tokens=24, rows=8)
    )
    engine.close = _break  # type: ignore[method-assign]
    return StartedEngine(engine, upkeep, None, ()), create_utility_handler(upkeep)


if __name__ == "__main__":
    main(sys.argv[1], _begin, _break)
