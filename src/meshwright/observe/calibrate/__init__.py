"""From rows of `mw bench` to a `Calibration`: fit the cost models' curves, and say how well.

solve        damped least squares on logarithms, in bounds, outliers counting less
subjects     what is fitted: products of each precision, grouped ones, attention; by which function
residuals    what a curve leaves, interpolated between measured shapes where that helps
fit          a subject's curve with its residuals
score        errors on rows that were not fitted
plain        work bound by memory, and launching
link         copies between a GPU and its host
device       which device rows are of, and peaks of one that no catalog has
calibrate    all of it
file         where calibrations lie
"""
