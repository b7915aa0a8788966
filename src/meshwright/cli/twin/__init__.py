"""The `mw twin` command: compares predicted and measured training steps on this machine."""
