"""The policy file, whole: the settings of the table, the version of the format, and conditional rules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from layerzero.kinds import KERNEL, PATTERN, TEXT, Kind, items, maybe, pairs, table, words
from layerzero.policy.rules import parse_conditions
from layerzero.settings import GROUPS, POLICY, SETTINGS


def _condition(wanted: object) -> str | None:
    try:
        parse_conditions("", wanted)
    except ValueError as error:
        return str(error)
    return None


_WHEN = 'context field → value, list of values, glob, or comparison such as ">=64, <256"'
_MATCH = table(
    "Which calls a rule speaks about.",
    {
        "op": (PATTERN, "*", "glob over op names, e.g. attention*"),
        "when": (pairs(TEXT, Kind({}, _condition)), {}, _WHEN),
    },
)
_RULE = table(
    "One rule; rules are read in order.",
    {
        "match": (_MATCH, {}, "the calls it speaks about; default: all"),
        "allow": (maybe(POLICY["allow"][0]), None, "only these kernels or backends"),
        **{name: POLICY[name] for name in ("deny", "prefer", "avoid", "boosts")},
        "lock": (maybe(KERNEL), None, "the kernel id that must run"),
    },
)
FILE: Final = table(
    "The whole file. Every key may be absent.",
    {
        "version": (words(1), 1, "version of this format"),
        **POLICY,
        "rules": (items(_RULE, alone=False), (), "conditional wishes, read in order"),
    },
)


def json_schema() -> Mapping[str, Any]:
    """JSON Schema of the policy file, for editors and for `lz policy schema`."""
    keys = FILE.schema["properties"]
    parts = {name: keys[name] for name in GROUPS} | {"rule": _RULE.schema}
    rules = {**keys["rules"], "items": {"$ref": "#/$defs/rule"}}
    keys = {**keys, **{name: {"$ref": f"#/$defs/{name}"} for name in GROUPS}, "rules": rules}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "LayerZero policy"}
    return {**head, **FILE.schema, "properties": keys, "$defs": parts}


def commented(schema: str) -> str:
    """A policy file that says nothing yet: every key as a comment with its meaning and its default.

    A setting stands right behind its #, so that taking that away sets it; remarks keep a blank.
    `schema` is the name of the JSON Schema beside it, by which editors complete and check.
    """
    lines = [
        f"# yaml-language-server: $schema={schema}",
        "# Policy of LayerZero. Every key may be absent; what stands here are the defaults.",
        "# `lz policy check` checks the file, `lz policy show` shows what holds and where it comes from.",
        "version: 1",
    ]
    group = ""
    for item in (item for item in SETTINGS if item.key):
        top, _, name = item.key.partition(".")
        value = json.dumps(list(item.default) if isinstance(item.default, tuple) else item.default)
        if name and top != group:
            lines += ["", f"# {GROUPS[top]}", f"#{top}:"]
        lines += [f"#  {name}: {value}  # {item.doc}"] if name else ["", f"# {item.doc}", f"#{top}: {value}"]
        group = top
    rule = ["#rules:", '#  - match: {op: attention, when: {seq_len_q: ">=1024"}}', "#    prefer: [sdpa]"]
    return "\n".join([*lines, "", f"# {FILE.schema['properties']['rules']['description']}", *rule]) + "\n"
