"""The twin: a step as it was measured on this machine, beside the same step as it was predicted.

compare        two timelines: order of passes, bubble, step, and what takes longer
middle         one step out of many, the middle one
computing      what ranks computed in a step on processors, for the analyses
calibration    what was timed of a step's parts, as the simulator reads it
prediction     the simulated step of a layout with measured parts
twins          all of it, for some layouts
layouts        what is tried where nothing is asked for
drift          steps of a run, one after another: as predicted, as before? `drift_sums` is the
               test, `drift_run` reads a run, `drift_ranks` and `drift_findings` say who and why
"""
