"""What people do with measurements: exchange, import, read, keep in order."""
