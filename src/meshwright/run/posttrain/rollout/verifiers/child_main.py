"""The entry point of a verifier's process, which keeps the sandbox and runs no verifier itself.

It is started by its path, with the standard library alone on its path, so that it starts quickly.
Its standard input is the socket over which checks come and verdicts go. It makes the namespaces and
starts the server in them, and ends with all that the server and verifiers started.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
from typing import Any, NoReturn

_END_S = 5.0


def main() -> None:
    """Serve until the socket closes."""
    # Whoever started this may have blocked or ignored what has to end it.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    connection = socket.socket(fileno=os.dup(0))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    os.close(nowhere)
    sys.path[:] = json.loads(os.environ.pop("MESHWRIGHT_VERIFIER_PATH"))
    from meshwright.run.posttrain.rollout.verifiers.frames import read_frame

    start = read_frame(connection)
    if start is not None:
        _keep_server(connection, start)


def _keep_server(connection: socket.socket, start: dict[str, Any]) -> NoReturn:
    from meshwright.run.posttrain.rollout.verifiers.judge_server import read_config, serve_checks
    from meshwright.run.posttrain.rollout.verifiers.sandbox.confinement import enter_process
    from meshwright.run.posttrain.rollout.verifiers.sandbox.privileges import forbid_inspection
    from meshwright.run.posttrain.rollout.verifiers.sandbox.process_tree import (
        end_with_parent,
        kill_descendants,
    )
    from meshwright.run.posttrain.rollout.verifiers.sandbox.sandbox_config import LayerRecord

    def end(*_: object) -> None:
        kill_descendants(server, within_s=_END_S)
        os._exit(128 + signal.SIGTERM)

    config = read_config(start)
    record = enter_process(config) if config.layers else LayerRecord()
    own = os.getpid()
    server = os.fork()
    if not server:
        code = 1
        try:
            if sys.platform == "linux":
                # In a PID namespace of its own it sees 0 as its parent, and dies with it.
                end_with_parent(own if os.getpid() != 1 else 0)
                forbid_inspection()
            serve_checks(connection, start, config, record)
            code = 0
        finally:
            os._exit(code)
    connection.close()
    signal.signal(signal.SIGTERM, end)
    if sys.platform == "linux":
        forbid_inspection()
    _, status = os.waitpid(server, 0)
    kill_descendants(within_s=_END_S)
    # Who asks may have been ended by force, and cannot tidy up.
    with contextlib.suppress(RecursionError):
        shutil.rmtree(config.folder, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(own, -code)
    os._exit(code)


if __name__ == "__main__":
    main()
