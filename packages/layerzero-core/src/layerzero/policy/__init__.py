"""Policy: what the user wants, from files, environment, code and calls, merged into one frozen value."""
