"""`python -m meshwright.run.posttrain.weight_sync.__main__ SOCKET`: a rank that takes versions."""

import sys

from meshwright.run.posttrain.weight_sync.weight_receiver import RECEIVING_RANKS
from meshwright.run.serve.engine.executor.multiproc_executor import run_follower_rank

if __name__ == "__main__":
    run_follower_rank(sys.argv[1], RECEIVING_RANKS)
