"""The core's ops, one module a family: public functions, declarations and what they share. Called as `lz.ops.NAME`."""
