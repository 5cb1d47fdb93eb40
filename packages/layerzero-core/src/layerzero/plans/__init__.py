"""Decisions made beforehand: dispatch tables."""
