"""`python -m meshwright.run.serve.engine.rank SOCKET`: a rank that follows the first one."""

import sys

from meshwright.run.serve.engine.ranks import follow

if __name__ == "__main__":
    follow(sys.argv[1])
