"""The pages that are made from the code name everything there is."""

from __future__ import annotations

import re

import click
import pytest

import layerzero as lz
from layerzero.reasons import ReasonCode
from layerzero.settings import SETTINGS
from layerzero.telemetry.metrics import CATALOGUE
from tools import reference, settings


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return reference.pages()


def test_every_op_has_a_page_and_a_row(pages: dict[str, str]) -> None:
    ops = {spec.op_id for spec in lz.list_ops()}
    assert {f"reference/ops/{op}" for op in ops} <= set(pages)
    rows = set(re.findall(r"^\| \[`(\w+)`\]", pages["reference/ops/index"], re.M))
    assert rows == ops
    for op in ops:
        assert f"lz.ops.{op}(" in pages[f"reference/ops/{op}"]


def test_every_verb_has_its_usage_and_every_option_its_row(pages: dict[str, str]) -> None:
    from layerzero_cli.root import cli

    text = pages["reference/commands"]
    seen = 0
    for command, ctx in reference.walk(cli, click.Context(cli, info_name="lz")):
        section = re.search(rf"^#+ {re.escape(ctx.command_path)}\n(.*?)(?=^#|\Z)", text, re.M | re.S)
        assert section is not None, ctx.command_path
        assert " ".join(command.get_usage(ctx).split()) in " ".join(section[1].split())
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert parameter.opts[0] in section[1], (ctx.command_path, parameter.opts)
        seen += 1
    assert seen > 30


def test_every_reason_code_has_cause_and_fix(pages: dict[str, str]) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", pages["reference/reasons"], re.M)
    assert {code for code, *_ in rows} == {code.value for code in ReasonCode}


def test_every_capabilities_field_is_told(pages: dict[str, str]) -> None:
    text = pages["reference/capabilities"]
    found = list(reference.fields(reference.capabilities_schema()))
    assert len(found) > 40
    for path, schema, _ in found:
        assert f"| `{path.rpartition('.')[2]}` |" in text, path
        assert schema.get("description"), f"{path} has no description in the schema"


def test_every_metric_is_told(pages: dict[str, str]) -> None:
    assert set(re.findall(r"^\| `(layerzero_\w+)` \|", pages["reference/metrics"], re.M)) == set(CATALOGUE)


def test_every_policy_key_and_variable_is_told() -> None:
    text = settings.page()
    for item in SETTINGS:
        assert not item.key or f"`{item.key}`" in text
        assert not item.variable or f"`LAYERZERO_{item.variable}`" in text


def test_every_public_name_is_told_with_its_docstring(pages: dict[str, str]) -> None:
    text = pages["reference/api"]
    names = reference.public_names()
    assert {"explain", "plan", "patch", "tune", "verify", "scoped", "observe"} <= set(names)
    for name in names:
        assert re.search(rf"^#* ?:*(?:{{py:\w+}} )?lz\.{name}\b", text, re.M), name
    for name in ("layerzero.plugin.Op", "layerzero.plugin.Registrar", "layerzero.errors.LayerZeroError"):
        assert name in text
    assert " at 0x" not in text and "<function" not in text


def test_every_page_that_is_made_is_listed_on_the_home_page() -> None:
    assert {path for _, path, _ in reference.LISTED} == set(reference.TITLES)
