"""Hang diagnosis: from flight-recorder dumps to the ranks that caused the hang."""

from meshwright.observe.analyze.hang.diagnosis import (
    BlockedOperation,
    CulpritRank,
    DumpDiagnosis,
    diagnose_hang,
)

__all__ = ["BlockedOperation", "CulpritRank", "DumpDiagnosis", "diagnose_hang"]
