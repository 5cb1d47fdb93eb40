"""Metrics and events for other programs: a port or file that Prometheus reads, OpenTelemetry, Chrome traces."""
