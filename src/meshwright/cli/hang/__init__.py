"""The `mw hang` command: diagnoses hung jobs from flight recorder dumps."""
