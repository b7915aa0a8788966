"""An engine in a process of its own, and what a server and it say to each other."""
