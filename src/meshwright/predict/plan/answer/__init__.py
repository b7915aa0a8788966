"""Answers of the layout search: plans, explanations, extrapolation and infeasibility.

`plan_answer` holds the result; the other modules explain it or say why no layout fits.
"""
