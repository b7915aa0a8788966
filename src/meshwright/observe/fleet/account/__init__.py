"""The account of a fleet: every GPU-hour of a window in exactly one bucket, and what follows."""

from meshwright.observe.fleet.account.account import Account, account, hours
from meshwright.observe.fleet.account.buckets import BUCKETS, CELLS, EVIDENCE, TITLES

__all__ = ["BUCKETS", "CELLS", "EVIDENCE", "TITLES", "Account", "account", "hours"]
