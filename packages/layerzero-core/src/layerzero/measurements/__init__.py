"""Measured times as selection reads them: which database, which of its rows are believed."""
