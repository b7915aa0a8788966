"""`python -m meshwright.run.posttrain.weights.rank SOCKET`: a rank that takes versions."""

import sys

from meshwright.run.posttrain.weights.taking import TAKING
from meshwright.run.serve.engine.ranks import follow

if __name__ == "__main__":
    follow(sys.argv[1], TAKING)
