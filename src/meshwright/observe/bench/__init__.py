"""What the machine at hand is capable of: measured case by case, kept as rows."""
