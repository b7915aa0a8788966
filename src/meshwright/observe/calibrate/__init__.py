"""From rows of `mw bench` to a `Calibration`: fit the cost models' curves, and say how well.

least_squares     damped least squares on logarithms, in bounds, outliers counting less
fit_targets       what is fitted, by which function: GEMMs of each precision, grouped, attention
residual_fit      what a curve leaves, interpolated between measured shapes where that helps
curve_fit         a subject's curve with its residuals
fit_score         errors on rows that were not fitted
bandwidth_fit     work bound by memory, and launching
host_link_fit     copies between a GPU and its host
expected_times    what rows would take on a sound device of their kind
measured_device   which device rows are of, and peaks of one that no catalog has
calibration       all of it
calibration_file  where calibrations lie
"""
