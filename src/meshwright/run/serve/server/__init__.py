"""The server: HTTP and the OpenAI API before whatever `Serves`.

    with Served(serve_app(engine, words, settings), settings) as served:
        print(served.url)

It knows neither models nor devices: asks go out, pieces come in.
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.run.serve.server.app import serve_app
    from meshwright.run.serve.server.running import Served, run_server
    from meshwright.run.serve.server.settings import ServerSettings
    from meshwright.run.serve.server.words import Words

__all__ = ["Served", "ServerSettings", "Words", "run_server", "serve_app"]

_HERE = "meshwright.run.serve.server"
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Served": f"{_HERE}.running",
        "ServerSettings": f"{_HERE}.settings",
        "Words": f"{_HERE}.words",
        "run_server": f"{_HERE}.running",
        "serve_app": f"{_HERE}.app",
    },
)
