"""Made-up calls of an op, and what a right kernel answers to them."""
