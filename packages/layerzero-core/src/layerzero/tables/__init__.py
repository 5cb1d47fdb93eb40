"""Decisions made beforehand, in a file: reading, checking and signing dispatch tables."""
