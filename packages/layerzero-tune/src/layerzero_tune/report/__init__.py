"""`lz report`: measurements as one page."""
