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
    from meshwright.run.serve.client.thread_client import ThreadEngineClient
    from meshwright.run.serve.engine.engine_config import EngineConfig
    from meshwright.run.serve.engine.startup import start_engine
    from meshwright.run.serve.server import ServerConfig, create_app

    begun = start_engine(MODEL, EngineConfig())
    if begun.tokenizer is None:
        raise SystemExit(f"{MODEL} has no tokenizer")
    settings = ServerConfig(
        model=MODEL.stem if MODEL.is_file() else MODEL.name,
        default_sampling_params=begun.tokenizer.default_sampling_params,
    )
    return create_app(ThreadEngineClient(begun.engine, begun.lifecycle), begun.tokenizer, settings)


app = serve.deployment(
    serve.ingress(answering)(),
    name="meshwright",
    ray_actor_options={"num_gpus": GPUS},
    max_ongoing_requests=512,
    autoscaling_config={"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 128},
    graceful_shutdown_timeout_s=60,
).bind()
