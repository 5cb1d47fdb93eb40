"""Dispatch tables: solved, compared, translated for other libraries."""
