"""Bytes of a policy file → plain dicts, plus the line of every key. Nothing here knows what the keys mean.

The file may come from anywhere, so size, nesting and node count are bounded while reading, YAML is read by the pure
Python SafeLoader (the C one crashes on deep nesting), and duplicate keys, anchors, aliases and tags are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from layerzero.errors import PolicyValidationError
from layerzero.kinds import Place, spell
from layerzero.reasons import ReasonCode

MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 24
MAX_NODES: Final = 20_000


class Parsed(NamedTuple):
    """The content of a file and where each key stands."""

    name: str
    data: dict[str, Any]
    lines: Mapping[Place, int]

    def line_of(self, place: Place) -> int | None:
        """Line of a key, or of the nearest key around it."""
        for length in range(len(place), -1, -1):
            if place[:length] in self.lines:
                return self.lines[place[:length]]
        return None


def texts_in(data: Any, place: Place = ()) -> Iterator[tuple[Place, str]]:
    """Every key and every text, with its place; no deeper than a file may nest."""
    if isinstance(data, str):
        yield place, data
    elif len(place) <= MAX_DEPTH and isinstance(data, Mapping):
        for key, value in data.items():
            if isinstance(key, str):
                yield (*place, key), key
            yield from texts_in(value, (*place, str(key)))
    elif len(place) <= MAX_DEPTH and isinstance(data, (list, tuple)):
        for index, item in enumerate(data):
            yield from texts_in(item, (*place, index))


def refusal(
    name: str, line: int | None, key: str | None, text: str, *, code: str = "POLICY_INVALID", **kwargs: Any
) -> PolicyValidationError:
    """The refusal of a file at a line and key."""
    where = f"{name}:{line}" if line else name
    kwargs.setdefault("value", text)
    return PolicyValidationError(f"{where}: {text}", line=line, key=key, code=ReasonCode(code), **kwargs)


_KEY: Final = re.compile(r"[\s\-{\[]*['\"]?([\w.*/-]{1,100})['\"]?\s*[:=]")


def _key_near(text: str, line: int) -> str | None:
    """The key written on a line or on the nearest one above, for errors that come before there is a tree."""
    for row in reversed(text.splitlines()[:line]):
        if found := _KEY.match(row[:400]):
            return found[1]
    return None


def too_large(raw: bytes, name: str) -> PolicyValidationError:
    """The refusal of a file that goes on past MAX_BYTES."""
    head = raw[:MAX_BYTES].decode("utf-8", "replace")
    line = head.count("\n") + 1
    text = f"the file is longer than {MAX_BYTES >> 20} MiB"
    return refusal(
        name, line, _key_near(head, line), text, code="CONFIG_FILE_TOO_LARGE", value=name, limit=f"{MAX_BYTES} bytes"
    )


def _decode(raw: bytes, name: str) -> str:
    if len(raw) > MAX_BYTES:
        raise too_large(raw, name)
    try:
        text = raw.decode("utf-8-sig")
        bad = re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", text)
        line, what = (text.count("\n", 0, bad.start()) + 1, repr(bad[0])) if bad else (0, "")
    except UnicodeDecodeError as error:
        text = raw[: error.start].decode("utf-8", "replace")
        line, what = text.count("\n") + 1, f"byte 0x{raw[error.start]:02x}"
    if line:
        raise refusal(
            name, line, _key_near(text, line), f"not a UTF-8 text file: {what}", value=what, limit="UTF-8 text"
        )
    return text


# -- YAML -----------------------------------------------------------------------------------------------------------
@lru_cache(maxsize=1)
def _loader() -> type[Any]:
    import yaml  # heavy: only when a YAML file is read

    class BoundedLoader(yaml.SafeLoader):
        """SafeLoader that refuses what a policy file may not use while composing, before recursion can run out."""

        depth = 0
        nodes = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            problem = None
            if isinstance(event, yaml.AliasEvent):
                problem = f"alias *{event.anchor} is not allowed here"
            elif event.anchor is not None:
                problem = f"anchor &{event.anchor} is not allowed here"
            elif getattr(event, "tag", None) is not None:
                problem = f"tag {event.tag} is not allowed here"
            elif self.depth >= MAX_DEPTH:
                problem = f"nested deeper than {MAX_DEPTH} levels"
            elif self.nodes >= MAX_NODES:
                problem = f"more than {MAX_NODES} values"
            if problem is not None:
                raise yaml.MarkedYAMLError(None, None, problem, event.start_mark)
            self.depth += 1
            self.nodes += 1
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    return BoundedLoader


def parse_yaml(raw: bytes, name: str) -> Parsed:
    """Read YAML. Raises PolicyValidationError with line and key for anything that is not plain data."""
    import yaml

    text = _decode(raw, name)
    lines: dict[Place, int] = {(): 1}
    loader = None
    try:
        loader = _loader()(text)  # looks at every character, and refuses some
        root = loader.get_single_node()
        data = {} if root is None else _yaml_value(loader, root, (), lines, name)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        problem = ", ".join(part for part in (error.context, error.problem) if part) or "not valid YAML"
        raise refusal(name, line, _key_near(text, line), problem) from None
    except yaml.YAMLError as error:
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        raise refusal(name, line, _key_near(text, line), str(error).splitlines()[0]) from None
    finally:
        if loader is not None:
            loader.dispose()
    return Parsed(name, _root(data, name), lines)


def _yaml_value(loader: Any, node: Any, place: Place, lines: dict[Place, int], name: str) -> Any:
    import yaml

    line = node.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*place, index)] = item.start_mark.line + 1
        return [_yaml_value(loader, item, (*place, index), lines, name) for index, item in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key_line = key_node.start_mark.line + 1
            key = key_node.value
            if key_node.tag != "tag:yaml.org,2002:str" or not isinstance(key, str):
                spelled = key if isinstance(key, str) else "a collection"
                # YAML 1.1 reads on, off, yes and no as booleans, so such a key needs quotes.
                text = f"{spelled!r} is no text key; put it in quotes"
                raise refusal(name, key_line, spell((*place, str(spelled))), text, value=spelled, limit="a text key")
            if key in mapping:
                first = lines[(*place, key)]
                text = f"duplicate key {key!r}, first given on line {first}"
                raise refusal(name, key_line, spell((*place, key)), text, value=key, limit="each key once")
            lines[(*place, key)] = key_line
            mapping[key] = _yaml_value(loader, value_node, (*place, key), lines, name)
        return mapping
    try:
        return loader.construct_object(node)
    except (ValueError, OverflowError) as error:  # an impossible date, a number of 5000 digits
        why = str(error).split(";")[0]
        raise refusal(name, line, spell(place), f"{spell(place)}: {why}", value=node.value[:60]) from None


def _root(data: Any, name: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        kind = type(data).__name__
        raise refusal(name, 1, "", f"expected a mapping of keys at the top, got {kind}", value=kind, limit="a mapping")
    return data


# -- TOML -----------------------------------------------------------------------------------------------------------
_TOML_QUIET: Final = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*', re.DOTALL
)
_TOML_AT: Final = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


def parse_toml(raw: bytes, name: str, table: Sequence[str] = ()) -> Parsed:
    """Read TOML, or one table of it (`("tool", "layerzero")`); a missing table is empty."""
    import tomllib

    text = _decode(raw, name)
    _bound_toml(text, name)
    try:
        data: Any = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = _TOML_AT.search(str(error))
        line = int(found[1]) if found and found[1] else text.count("\n") + 1
        problem = _TOML_AT.sub("", str(error))
        raise refusal(name, line, _key_near(text, line), problem) from None
    except (RecursionError, ValueError) as error:
        raise refusal(name, 1, _key_near(text, 1), f"not readable as TOML: {type(error).__name__}") from None
    lines = _toml_lines(text)
    for part in table:
        data = data.get(part, {}) if isinstance(data, dict) else data
    here = tuple(table)
    inner = {place[len(here) :]: line for place, line in lines.items() if place[: len(here)] == here}
    _bound_tree(data, name, inner)
    return Parsed(name, _root(data, name), {(): 1, **inner})


def _bound_toml(text: str, name: str) -> None:
    """Refuse before parsing: tomllib recurses into brackets and needs quadratic memory for long dotted keys."""
    quiet = _TOML_QUIET.sub(lambda found: "\n" * found[0].count("\n"), text)
    depth = nodes = start = 0
    for found in re.finditer(r"[\[\]{},=\n]|\Z", quiet):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        nodes += found[0] in (",", "=")
        dots = quiet.count(".", start, found.start())
        start = found.end()
        if max(depth, dots) > MAX_DEPTH or nodes > MAX_NODES:
            line = quiet.count("\n", 0, found.start()) + 1
            what = f"more than {MAX_NODES} values" if nodes > MAX_NODES else f"nested deeper than {MAX_DEPTH} levels"
            raise refusal(name, line, _key_near(text, line), what)


def _bound_tree(data: Any, name: str, lines: Mapping[Place, int]) -> None:
    """Dotted keys nest without brackets."""
    level: list[tuple[Place, Any]] = [((), data)]
    for _ in range(MAX_DEPTH + 1):
        level = [
            ((place or (key,)), value)
            for place, branch in level
            for key, value in (branch.items() if isinstance(branch, dict) else [])
        ]
    if level:
        key = level[0][0]
        line = next((line for place, line in lines.items() if place[:1] == key), None)
        raise refusal(name, line, spell(key), f"nested deeper than {MAX_DEPTH} levels")


def _toml_lines(text: str) -> dict[Place, int]:
    """Where the keys stand. A line scanner: tomllib keeps no positions; keys of an inline table get its line."""
    lines: dict[Place, int] = {}
    table: Place = ()
    arrays: dict[Place, int] = {}
    for number, row in enumerate(text.splitlines(), 1):
        row = row.strip()
        if header := re.match(r"(\[\[?)\s*([^\[\]]+?)\s*\]", row):
            table = _toml_key(header[2], arrays)
            if header[1] == "[[":
                arrays[table] = arrays.get(table, -1) + 1
                lines.setdefault(table, number)
                table = (*table, arrays[table])
            lines.setdefault(table, number)
        elif "=" in row and not row.startswith("#"):
            place = (*table, *_toml_key(row.split("=", 1)[0].strip(), {}))
            for length in range(len(table) + 1, len(place) + 1):
                lines.setdefault(place[:length], number)
    return lines


def _toml_key(text: str, arrays: Mapping[Place, int]) -> Place:
    place: Place = ()
    parts = re.findall(r'"[^"]*"|\'[^\']*\'|[^.\s]+', text)
    for part in parts[: MAX_DEPTH + 1]:
        place = (*place, part.strip("\"'"))
        if place in arrays and len(place) < len(parts):
            place = (*place, arrays[place])
    return place
