"""Hang diagnosis: from flight-recorder dumps to the ranks that caused the hang."""

from meshwright.observe.analyze.hang.verdict import Culprit, Stall, Verdict, diagnose

__all__ = ["Culprit", "Stall", "Verdict", "diagnose"]
