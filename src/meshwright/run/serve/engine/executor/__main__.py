"""`python -m meshwright.run.serve.engine.executor SOCKET`: a rank that follows rank 0."""

import sys

from meshwright.run.serve.engine.executor.multiproc_executor import run_follower_rank

if __name__ == "__main__":
    run_follower_rank(sys.argv[1])
