"""What runs inside a watched process: the standard library, and the torch that is there already.

The job may run in an environment without meshwright. These modules are therefore loaded from their
files under a name of their own, `_meshwright_watch`, and name each other relatively. They decide
nothing: they time steps, take a capture when the watcher asks for one, and count what that costs.
"""
