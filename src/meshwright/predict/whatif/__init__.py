"""What-if predictions and layout suggestions: one changed parameter, predicted again."""
