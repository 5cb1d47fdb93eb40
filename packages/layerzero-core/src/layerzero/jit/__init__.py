"""Kernels compiled at run time: where they are kept, what is known of them, the queue that compiles beside requests."""
