"""The `mw watch` command and `mw twin --monitor`: live monitoring of jobs and step-time drift."""
