"""Grid files: what they expand to, and what is said about a wrong one."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from layerzero.errors import ConfigurationError
from layerzero_cli.calls import context
from layerzero_cli.root import cli
from layerzero_tune.grid import OPTIONS, Grid, load, parse

HEAD = 'schema_version = "1.0"\n'
CASE = HEAD + '[[case]]\nname = "n {s}"\nop = "attention"\neach = { s = [16, 32] }\nq = "1,{s},4,64"\n'
SHIPPED = Path(__file__).resolve().parents[3] / "benchmarks" / "grid.toml"


def made(text: str) -> Grid:
    return parse(HEAD + text, "my.toml")


def test_each_makes_one_case_of_every_combination_in_order():
    grid = made(
        '[[case]]\nname = "B{b} S{s}"\nop = "attention"\ntags = ["decode"]\ndevices = ["cuda"]\n'
        'each = { b = [1, 4], s = { from = 1024, to = 5000, times = 2 } }\ngrows = ["s"]\n'
        'q = "{b},1,32,128"\nk = "{b},{s},8,128"\nlayout = "BSHD"\ncausal = "bottom_right"\nlse = true\n'
    )
    assert [case.name for case in grid.cases] == [f"B{b} S{s}" for b in (1, 4) for s in (1024, 2048, 4096)]
    case = grid.cases[4]
    assert case.options == {
        "q": (4, 1, 32, 128), "k": (4, 2048, 8, 128), "layout": "BSHD", "causal": "bottom_right", "lse": True,
    }  # fmt: skip
    assert case.values == {"b": 4, "s": 2048} and case.grows == ("s",) and case.tags == ("decode",)


def test_ranges_by_steps_and_arithmetic_in_braces():
    grid = made(
        '[[case]]\nname = "{n}"\nop = "linear"\neach = { n = { from = 3, to = 10, step = 3 } }\n'
        'shape = "{n * 2},{ceil(n / 2)}"\nweight = [8, 2]\ncausal = false\n'
    )
    assert [case.options["shape"] for case in grid.cases] == [(6, 2), (12, 3), (18, 5)]
    assert grid.cases[0].options["weight"] == (8, 2) and "causal" not in grid.cases[0].options


def test_a_case_can_be_asked_for_at_another_size():
    case = parse(CASE).cases[0]
    other = case.at(s=20)
    assert (other.name, other.options["q"], other.values) == ("n 20", (1, 20, 4, 64), {"s": 20})
    with pytest.raises(ConfigurationError, match="no 't' in each"):
        case.at(t=1)


def test_cases_are_picked_by_device_tag_and_op():
    grid = made(
        '[[case]]\nname = "a"\nop = "rope"\ndevices = ["cpu"]\ntags = ["x"]\nq = "1,2,3,4"\n'
        '[[case]]\nname = "b"\nop = "rms_norm"\ntags = ["x", "y"]\nshape = "2,3"\n'
    )
    assert [case.name for case in grid.pick(device="cuda").cases] == ["b"]
    assert [case.name for case in grid.pick(device="cpu", tags=["x"]).cases] == ["a", "b"]
    assert len(grid.pick(tags=["y"], ops=["rope"])) == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[[case]]\nop = "rope"\n', "case 1: needs name"),
        ('[[case]]\nname = "a"\n', "case 1 (a): needs op"),
        ('[[case]]\nname = "a"\nop = "rope"\nshaep = "1"\n', "did you mean shape?"),
        ('[[case]]\nname = "a"\nop = "rope"\nq = "1,x"\n', "q is no shape"),
        ('[[case]]\nname = "a"\nop = "rope"\nq = "1,{s}"\n', "'s' is not in each"),
        ('[[case]]\nname = "a"\nop = "rope"\neach = { s = [1] }\nq = "{s.x}"\n', "is no arithmetic"),
        ('[[case]]\nname = "a"\nop = "rope"\neach = { s = [1] }\nq = "{__import__(s)}"\n', "is no arithmetic"),
        ('[[case]]\nname = "a"\nop = "rope"\neach = { s = [] }\n', "needs whole numbers"),
        ('[[case]]\nname = "a"\nop = "rope"\neach = { s = [2, 2] }\n', "twice"),
        ('[[case]]\nname = "a"\nop = "rope"\neach = { s = { from = 4, to = 1, step = 1 } }\n', "does not grow"),
        ('[[case]]\nname = "a"\nop = "rope"\neach = { s = { from = 1, to = 9, times = 1 } }\n', "does not grow"),
        ('[[case]]\nname = "a"\nop = "rope"\neach = { s = { from = 1, upto = 9 } }\n', "is no range"),
        ('[[case]]\nname = "a"\nop = "rope"\neach = { s = [1, 2] }\nq = "{s},2,3,4"\n', "the name 'a' comes twice"),
        ('[[case]]\nname = "a"\nop = "rope"\ndevices = ["gpu"]\n', "unknown device 'gpu'"),
        ('[[case]]\nname = "a"\nop = "rope"\ndevices = "cpu"\n', "devices is a list"),
        ('[[case]]\nname = "a"\nop = "rope"\ngrows = ["s"]\n', "grows names 's'"),
        ('[[case]]\nname = "a"\nop = "rope"\ncausal = "left"\n', "causal cannot be 'left'"),
        ('[[case]]\nname = "a"\nop = "rope"\nlse = "yes"\n', "lse cannot be 'yes'"),
        ('[[case]]\nname = "a"\nop = "rope"\ntop_p = "0.9"\n', "top_p cannot be"),
        ('[[case]]\nname = "{s}{t}"\nop = "rope"\neach = { s = { from = 1, to = 200, step = 1 }, '
         't = { from = 1, to = 200, step = 1 } }\n', "40000 cases"),
        ('[case]\nname = "a"\n', "[[case]] tables"),
        ("other = 1\n", "unknown key 'other'"),
        ("[[case\n", "not TOML"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_clear_error(text: str, says: str):
    with pytest.raises(ConfigurationError) as caught:
        made(text)
    assert says in str(caught.value) and "my.toml" in str(caught.value)


def test_version_size_and_place_of_the_file_are_checked(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="schema_version"):
        parse("x = 1")
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path / "none.toml")
    assert caught.value.code.value == "CONFIG_FILE_MISSING"
    large = tmp_path / "large.toml"
    large.write_text(HEAD + "#" * (1 << 20))
    with pytest.raises(ConfigurationError) as caught:
        load(large)
    assert caught.value.code.value == "CONFIG_FILE_TOO_LARGE"
    broken = tmp_path / "broken.toml"
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load(broken)


def test_the_words_of_a_case_are_the_options_of_explain():
    explain = cli.get_command(click.Context(cli), "explain")
    assert explain is not None
    words = {item.name for item in explain.params if isinstance(item, click.Option)}
    assert set(OPTIONS) == words - {"as_json", "device", "everything"}


def test_every_case_of_the_shipped_grid_describes_a_call():
    if not SHIPPED.exists():
        pytest.skip("the grid is part of the repository, not of the package")
    grid = load(SHIPPED)
    ops = set()
    for case in grid.cases:
        for device in case.devices:
            found = context(case.op, {**case.options, "device": "h200" if device == "cuda" else device})
            assert found.op == case.op
            ops.add((case.op, device))
    wanted = {"attention", "paged_attention", "varlen_attention", "rms_norm", "add_rms_norm", "layer_norm", "rope",
              "silu_and_mul", "gelu_and_mul", "sample", "linear", "moe", "mla_paged_attention"}  # fmt: skip
    assert ops == {(op, device) for op in wanted for device in ("cpu", "cuda")}
