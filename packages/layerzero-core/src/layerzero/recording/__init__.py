"""Recorded calls: counted while a program runs, kept in a file."""
