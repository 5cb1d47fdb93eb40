"""The public functions that are not ops: control, inspection, planning."""
