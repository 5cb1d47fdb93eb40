"""A folder of definitions, workloads and traces, laid out as flashinfer-bench lays it out.

definitions/<op_type>/<name>.json     workloads/<op_type>/<name>.jsonl     traces/<op_type>/<name>.jsonl
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from layerzero.errors import ConfigurationError, InvalidInputError, UnknownNameError
from layerzero.verification.definitions.schema import Definition, load_definition
from layerzero.verification.definitions.trace import Trace, Workload, read_traces

__all__ = ["Dataset", "Problem", "open_dataset"]

# Another project's variable; the data it names is read, never run, so it decides nothing about trust.
_ROOT_VARIABLE = "FIB_DATASET_PATH"


@dataclass(frozen=True, slots=True)
class Problem:
    """A file, or a line of one, that had to be left out."""

    path: Path
    error: ConfigurationError

    def __str__(self) -> str:
        return f"{self.path}: {self.error}"


@dataclass(frozen=True)
class Dataset:
    """What a folder holds. Definitions that cannot be read are in `problems`, the others by name."""

    root: Path
    definitions: Mapping[str, Definition]
    problems: tuple[Problem, ...] = ()

    @property
    def op_types(self) -> tuple[str, ...]:
        """Kinds of definitions here."""
        return tuple(sorted({definition.op_type for definition in self.definitions.values()}))

    def select(
        self, names: Iterable[str] = (), op_types: Iterable[str] = (), *, everything: bool = False
    ) -> list[Definition]:
        """Definitions by name, by op_type, or all; in the order of their names."""
        names, op_types = tuple(names), tuple(op_types)
        if not (names or op_types or everything):
            raise InvalidInputError(
                "nothing is selected", code="VALUE_INVALID", value="nothing", limit="a name, an op_type, or all"
            )
        for given, known, what in ((names, self.definitions, "definition"), (op_types, self.op_types, "op_type")):
            for name in given:
                if name not in known:
                    raise self._unknown(name, list(known), what)
        return [
            definition
            for _, definition in sorted(self.definitions.items())
            if everything or definition.name in names or definition.op_type in op_types
        ]

    def workloads(self, definition: Definition) -> tuple[list[Workload], list[Problem]]:
        """The workloads that come with a definition, and the lines that cannot be read; both empty without a file."""
        path = self._lines("workloads", definition)
        if not path.is_file():
            return [], []
        good, bad = self._own(path, definition)
        return [trace.workload for trace in good], bad

    def traces(self, definition: Definition) -> tuple[list[Trace], list[Problem]]:
        """What was recorded about a definition before."""
        path = self._lines("traces", definition)
        return self._own(path, definition) if path.is_file() else ([], [])

    def traces_path(self, definition: Definition) -> Path:
        """The file that holds the traces of a definition."""
        return self._lines("traces", definition)

    def tested(self, definition: Definition) -> str | None:
        """Where a test of this definition is already written down, if it is: such ones are left out unless forced."""
        word = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(definition.name)}(?![A-Za-z0-9_])")
        for path in sorted((self.root / "tests" / "references").glob("test_*.py")):
            if word.search(path.read_text(encoding="utf-8", errors="replace")):
                return str(path.relative_to(self.root))
        if any(trace.evaluation is not None for trace in self.traces(definition)[0]):
            return str(self.traces_path(definition).relative_to(self.root))
        return None

    def _own(self, path: Path, definition: Definition) -> tuple[list[Trace], list[Problem]]:
        good, bad = read_traces(path)
        mine = [trace for trace in good if trace.definition == definition.name]
        return mine, [Problem(path, error) for error in bad]

    def _lines(self, folder: str, definition: Definition) -> Path:
        return self.root / folder / definition.op_type / f"{definition.name}.jsonl"

    def _unknown(self, name: str, known: list[str], what: str) -> UnknownNameError:
        near = ", ".join(difflib.get_close_matches(name, known, 3) or sorted(known)[:8]) or "nothing: it is empty"
        return UnknownNameError(
            f"{self.root} holds no {what} {name!r}",
            code="VALUE_INVALID",
            value=name,
            limit=near,
            hint=f"it holds {near}",
        )


def open_dataset(root: str | Path | None = None) -> Dataset:
    """Read every definition under `root`, or under FIB_DATASET_PATH. Bad files are reported, not raised."""
    given = root if root is not None else os.environ.get(_ROOT_VARIABLE)
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
