"""The `mw calibrate` command: fits a device calibration to `mw bench` results."""
