"""Looking at the machine: which devices are here, what they can do, how much memory is free."""
