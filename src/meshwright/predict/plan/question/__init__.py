"""`PlanQuestion` and `LayoutSpace`: the inputs of the layout search."""
