"""`python -m meshwright.run.serve.worker SOCKET`: the process of an engine; servers start it."""

import sys

from meshwright.run.serve.worker.worker_process import main

if __name__ == "__main__":
    main(sys.argv[1])
