"""A folder of definitions, workloads and traces, laid out as flashinfer-bench lays it out.

definitions/<op_type>/<name>.json     workloads/<op_type>/<name>.jsonl     traces/<op_type>/<name>.jsonl

Folders and names of files are a habit, not a rule: as in flashinfer-bench every *.json and *.jsonl below the three
folders is read, and the lines themselves say which definition they are of.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from layerzero.errors import ConfigurationError, invalid
from layerzero_verify.definitions.schema import Definition, load_definition
from layerzero_verify.definitions.trace import Trace, Workload, read_traces
from layerzero_verify.lineup import unknown

# Another project's variable; the data it names is read, never run, so it decides nothing about trust.
_ROOT_VARIABLE = "FIB_DATASET_PATH"
_ROOT_DEFAULT = Path("~/.cache/flashinfer_bench/dataset")  # where that project looks without the variable


@dataclass(frozen=True, slots=True)
class Problem:
    """A file, or a line of one, that had to be left out."""

    path: Path
    error: ConfigurationError

    def __str__(self) -> str:
        return f"{self.path}: {self.error}"


@lru_cache(maxsize=4096)
def _lines(path: Path, stamp: tuple[int, int]) -> tuple[Mapping[str, list[Trace]], tuple[Problem, ...]]:
    """The lines of a file by the definition they name, and what cannot be read; anew for another time or size."""
    try:
        good, bad = read_traces(path)
    except ConfigurationError as error:
        good, bad = [], [error]
    by_name: dict[str, list[Trace]] = {}
    for trace in good:
        by_name.setdefault(trace.definition, []).append(trace)
    return by_name, tuple(Problem(path, error) for error in bad)


@dataclass(frozen=True)
class Dataset:
    """What a folder holds. Definitions that cannot be read are in `problems`, the others by name."""

    root: Path
    definitions: Mapping[str, Definition]
    problems: tuple[Problem, ...] = ()

    @property
    def op_types(self) -> tuple[str, ...]:
        return tuple(sorted({definition.op_type for definition in self.definitions.values()}))

    def select(
        self, names: Iterable[str] = (), op_types: Iterable[str] = (), *, everything: bool = False
    ) -> list[Definition]:
        """Definitions by name, by op_type, or all; in the order of their names."""
        names, op_types = tuple(names), tuple(op_types)
        if not (names or op_types or everything):
            raise invalid("VALUE_INVALID", "nothing", "a name, an op_type, or all", "nothing is selected")
        for given, known, what in ((names, self.definitions, "definition"), (op_types, self.op_types, "op_type")):
            for name in given:
                if name not in known:
                    raise unknown(f"{self.root} holds no {what} {name!r}", name, known)
        return [
            definition
            for _, definition in sorted(self.definitions.items())
            if everything or definition.name in names or definition.op_type in op_types
        ]

    def workloads(self, definition: Definition) -> tuple[list[Workload], list[Problem]]:
        """The workloads that come with a definition, and the lines that cannot be read; both empty without any."""
        good, bad = self._own("workloads", definition)
        return [trace.workload for _, trace in good], bad

    def traces(self, definition: Definition) -> tuple[list[Trace], list[Problem]]:
        good, bad = self._own("traces", definition)
        return [trace for _, trace in good], bad

    def strays(self) -> tuple[list[str], list[Problem]]:
        """What belongs to no definition here: names that lines speak of, and bad lines in files of nobody's."""
        names: set[str] = set()
        problems: list[Problem] = []
        for path, by_name, bad in (item for folder in ("workloads", "traces") for item in self._files(folder)):
            names.update(set(by_name) - set(self.definitions))
            if path.stem not in self.definitions and not set(by_name) & set(self.definitions):
                problems += bad
        return sorted(names), problems

    def tested(self, definition: Definition) -> str | None:
        """Where a test of this definition is already written down, if it is: such ones are left out unless forced."""
        word = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(definition.name)}(?![A-Za-z0-9_])")
        for path in sorted((self.root / "tests" / "references").glob("test_*.py")):
            if word.search(path.read_text(encoding="utf-8", errors="replace")):
                return str(path.relative_to(self.root))
        for path, trace in self._own("traces", definition)[0]:
            if trace.evaluation is not None:
                return str(path.relative_to(self.root))
        return None

    def _own(self, folder: str, definition: Definition) -> tuple[list[tuple[Path, Trace]], list[Problem]]:
        """The lines of a definition with their files; bad ones of a file that holds some, or that bears its name."""
        good: list[tuple[Path, Trace]] = []
        bad: list[Problem] = []
        for path, by_name, problems in self._files(folder):
            mine = by_name.get(definition.name, [])
            good += [(path, trace) for trace in mine]
            if mine or path.stem == definition.name:
                bad += problems
        return good, bad

    def _files(self, folder: str) -> Iterator[tuple[Path, Mapping[str, list[Trace]], tuple[Problem, ...]]]:
        """Every file of lines, read anew when it was written since."""
        for path in sorted((self.root / folder).rglob("*.jsonl")):
            try:
                found = path.stat()
                yield path, *_lines(path, (found.st_mtime_ns, found.st_size))
            except OSError:  # removed while we look
                continue


def open_dataset(root: str | Path | None = None) -> Dataset:
    """Read every definition under `root`, else where flashinfer-bench looks. Bad files are reported, not raised."""
    given = root if root is not None else os.environ.get(_ROOT_VARIABLE)
    if not given and _ROOT_DEFAULT.expanduser().is_dir():
        given = _ROOT_DEFAULT
    if not given:
        raise ConfigurationError(
            "no dataset is named", code="CONFIG_FILE_MISSING", value="", hint=f"give --root or set {_ROOT_VARIABLE}"
        )
    folder = Path(given).expanduser()
    if not (folder / "definitions").is_dir():
        raise ConfigurationError(
            f"{folder} is no dataset: it has no folder definitions", code="CONFIG_FILE_MISSING", value=str(folder)
        )
    found: dict[str, Definition] = {}
    problems: list[Problem] = []
    for path in sorted((folder / "definitions").rglob("*.json")):
        try:
            definition = load_definition(path)
            if definition.name in found:
                raise ConfigurationError(
                    f"{definition.name} is defined twice",
                    code="SCHEMA_INVALID",
                    value=definition.name,
                    limit=str(found[definition.name].source),
                )
            found[definition.name] = definition
        except ConfigurationError as error:
            problems.append(Problem(path, error))
    return Dataset(folder, found, tuple(problems))
