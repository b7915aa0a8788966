"""The `mw plan` commands: layout search for training, and plans for serving and RL.

`flags` builds the question, `command` runs the search, and `screen` renders the answer; `goals`
and `sweep` handle inverse questions and parameter sweeps.
"""
