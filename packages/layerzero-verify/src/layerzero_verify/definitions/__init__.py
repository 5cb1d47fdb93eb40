"""Definitions of kernels as flashinfer-bench writes them: read them, make inputs, check any kernel, write traces.

    dataset = open_dataset("path/to/dataset")
    report = check(dataset, dataset.select(op_types=["rmsnorm"]), Options(trust=("path/to/dataset",)))
    write_traces(report, Path("traces.jsonl"))

The code inside a definition runs only when its file is in a place named on purpose (see `trust`).
"""

from layerzero_verify.definitions.dataset import open_dataset
from layerzero_verify.definitions.run import check, write_traces
from layerzero_verify.definitions.trace import Options, read_traces

__all__ = ["Options", "check", "open_dataset", "read_traces", "write_traces"]
