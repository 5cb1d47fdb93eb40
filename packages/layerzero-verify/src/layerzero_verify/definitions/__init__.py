"""Definitions of kernels as flashinfer-bench writes them: read them, make inputs, check any kernel, write traces.

    dataset = open_dataset("path/to/dataset")
    report = check(dataset, dataset.select(op_types=["rmsnorm"]), Options(trust=("path/to/dataset",)))
    write_traces(report, Path("traces.jsonl"))

The code inside a definition runs only when its file is in a place named on purpose (see `trust`).
"""

from layerzero_verify.definitions.dataset import Dataset, Problem, open_dataset
from layerzero_verify.definitions.reference import Trust, compile_reference
from layerzero_verify.definitions.run import check, check_definition, traces_of, write_traces
from layerzero_verify.definitions.schema import Definition, load_definition, parse_definition
from layerzero_verify.definitions.sizes import RUNNER, SIZES, workload_of, workloads_for
from layerzero_verify.definitions.trace import (
    Options,
    Outcome,
    Report,
    Status,
    Trace,
    Workload,
    append_traces,
    read_traces,
)

__all__ = [
    "RUNNER",
    "SIZES",
    "Dataset",
    "Definition",
    "Options",
    "Outcome",
    "Problem",
    "Report",
    "Status",
    "Trace",
    "Trust",
    "Workload",
    "append_traces",
    "check",
    "check_definition",
    "compile_reference",
    "load_definition",
    "open_dataset",
    "parse_definition",
    "read_traces",
    "traces_of",
    "workload_of",
    "workloads_for",
    "write_traces",
]
