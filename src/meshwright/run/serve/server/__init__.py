"""The server: HTTP and the OpenAI API before whatever `EngineClient`.

    with BackgroundServer(create_app(engine, tokenizer, config), config) as server:
        print(server.url)

It knows neither models nor devices: asks go out, pieces come in.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.run.serve.server.app import create_app
    from meshwright.run.serve.server.http_server import BackgroundServer, run_server
    from meshwright.run.serve.server.server_config import ServerConfig
    from meshwright.run.serve.tokenizer.tokenizer_like import TokenizerLike

__all__ = ["BackgroundServer", "ServerConfig", "TokenizerLike", "create_app", "run_server"]

_HERE = "meshwright.run.serve.server"
__getattr__, __dir__ = make_lazy_getattr(
    __name__,
    {
        "BackgroundServer": "meshwright.run.serve.server.http_server",
        "ServerConfig": "meshwright.run.serve.server.server_config",
        "TokenizerLike": "meshwright.run.serve.tokenizer.tokenizer_like",
        "run_server": "meshwright.run.serve.server.http_server",
        "create_app": "meshwright.run.serve.server.app",
    },
)
