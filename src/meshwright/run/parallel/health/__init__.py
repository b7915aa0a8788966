"""Runtime health of ranks: flight recorder, watchdog, collective order check, hang diagnosis.

`Watchdog` reads the `RankHealth` of every rank from a `StatusStore` and ends a job that cannot
continue.
"""
