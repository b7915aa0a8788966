"""The twin: a step as it was measured on this machine, beside the same step as it was predicted.

step_comparison   two timelines: order of passes, bubble, step, and what takes longer
step_breakdown    one step out of many, the middle one, by the kind of work
measured_step     what ranks computed in a step on processors, for the analyses
measured_costs    what was timed of a step's parts, as the simulator reads it
predicted_step    the simulated step of a layout with measured parts
layout_twin       all of it, for some layouts
device_twin       the step of one device, term by term
default_configs   what is tried where nothing is asked for
drift             steps of a run, one after another: as predicted, as before? `drift_detector` is
                  the test, `run_monitor` follows a run, `slow_rank` and `drift_findings` say who
                  and why
"""
