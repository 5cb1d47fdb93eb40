"""Before the first request: which calls a process will make, and having them ready."""
