"""Measured kernel times that outlive the process: a small SQLite database that can be trusted after any crash."""
