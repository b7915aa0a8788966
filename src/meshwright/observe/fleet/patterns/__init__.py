"""Named inefficiencies of a fleet: what shows them, what they cost, whose they are, what to do.

`read` makes a `Fleet` of a store, `find` looks for every pattern in it, `letters` writes to owners.
"""

from meshwright.observe.fleet.patterns.find import Case, cases, find, patterns, plain
from meshwright.observe.fleet.patterns.fleet import Fleet, fleet_of
from meshwright.observe.fleet.patterns.letters import letter, letters
from meshwright.observe.fleet.patterns.read import read
from meshwright.observe.fleet.patterns.registry import Hit, Pattern
from meshwright.observe.fleet.patterns.told import Told

__all__ = [
    "Case",
    "Fleet",
    "Hit",
    "Pattern",
    "Told",
    "cases",
    "find",
    "fleet_of",
    "letter",
    "letters",
    "patterns",
    "plain",
    "read",
]
