"""`python -m meshwright.run.posttrain.workers SOCKET`: a process that draws; trainers start it."""

import sys

from meshwright.run.posttrain.workers.worker_main import main

if __name__ == "__main__":
    main(sys.argv[1])
