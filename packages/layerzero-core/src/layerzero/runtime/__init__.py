"""The one mutable place: which World is current, who may replace it, and when."""
