"""The process of an engine that never gets ready: `STUCK` says what it still does."""

import os
import socket
import sys
import time

if __name__ == "__main__":
    if os.environ["STUCK"] == "begins":
        from meshwright.run.serve.worker.worker_process import main

        main(sys.argv[1], lambda _: time.sleep(600))  # type: ignore[arg-type,return-value]
    elif os.environ["STUCK"] == "connects":
        way = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        way.connect(sys.argv[1])
    time.sleep(600)
