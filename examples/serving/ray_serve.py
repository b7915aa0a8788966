"""The engine under Ray Serve: replicas on the GPUs of a cluster, more of them under load.

    MESHWRIGHT_MODEL=/models/llama-3.1-8b serve run --working-dir examples/serving ray_serve:app

Every replica is one engine with its own GPU (MESHWRIGHT_GPUS=0 runs it on a processor). Ray starts
more of them where more than 128 requests are under way in each, and fewer again when that is over.
"""

import os
from pathlib import Path

from ray import serve
from starlette.applications import Starlette

MODEL = Path(os.environ.get("MESHWRIGHT_MODEL", "/models/llama-3.1-8b"))
GPUS = float(os.environ.get("MESHWRIGHT_GPUS", "1"))


def answering() -> Starlette:
    """Start an engine, and return what answers for it; runs in each replica."""
    from meshwright.run.serve.engine.loop import EngineLoop
    from meshwright.run.serve.engine.settings import EngineSettings
    from meshwright.run.serve.engine.start import start_engine
    from meshwright.run.serve.server import ServerSettings, serve_app

    begun = start_engine(MODEL, EngineSettings())
    if begun.words is None:
        raise SystemExit(f"{MODEL} has no tokenizer")
    settings = ServerSettings(
        model=MODEL.stem if MODEL.is_file() else MODEL.name, sampling=begun.words.sampling
    )
    return serve_app(EngineLoop(begun.engine, begun.upkeep), begun.words, settings)


app = serve.deployment(
    serve.ingress(answering)(),
    name="meshwright",
    ray_actor_options={"num_gpus": GPUS},
    max_ongoing_requests=512,
    autoscaling_config={"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 128},
    graceful_shutdown_timeout_s=60,
).bind()
