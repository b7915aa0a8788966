"""How long a cold interpreter takes to import the package and to print help."""

import statistics
import subprocess
import sys
import time

NAME = "start_up"
QUESTION = "How long do `import meshwright` and `mw --help` take on a cold interpreter?"

COMMANDS = {
    "import meshwright": (["-c", "import meshwright"], "< 150"),
    "mw --help": (["-m", "meshwright", "--help"], "< 300"),
    "mw models llama3.1-8b": (["-m", "meshwright", "models", "llama3.1-8b"], None),
    "mw layout check": (["-m", "meshwright", "layout", "check", "examples/llama3-70b.toml"], None),
}
PEERS = {
    "bare interpreter": ["-c", "pass"],
    "import argparse": ["-c", "import argparse"],
    "import numpy": ["-c", "import numpy"],
    "import torch": ["-c", "import torch"],
}


def median_ms(arguments: list[str], repeats: int) -> float:
    """Run Python with these arguments and return the median wall time."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def measure(quick: bool) -> dict[str, object]:
    """Measure and return the figures."""
    repeats = 3 if quick else 15
    figures = []
    for name, (arguments, target) in COMMANDS.items():
        figure = {"name": name, "value": median_ms(arguments, repeats), "unit": "ms"}
        figures.append({**figure, "target": target} if target else figure)
    peers = [
        {"name": name, "value": median_ms(arguments, repeats), "unit": "ms"}
        for name, arguments in PEERS.items()
    ]
    return {
        "figures": figures,
        "peers": peers,
        "notes": "Wall time of the whole process, interpreter included; files are in the page "
        "cache, bytecode is compiled.",
    }
