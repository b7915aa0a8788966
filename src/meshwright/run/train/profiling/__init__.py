"""What a prediction of this machine's own runs needs: pieces of a step, and whole steps, timed."""
