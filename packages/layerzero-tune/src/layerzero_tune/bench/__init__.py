"""`lz bench`: kernels against each other, torch's own code and the rest of the field."""
