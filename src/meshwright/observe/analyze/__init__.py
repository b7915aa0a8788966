"""What a timeline says: pure functions, each from a `Timeline` to plain values."""
