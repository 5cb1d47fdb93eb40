"""The `lz` program: every verb, plain and as JSON, its exit codes, and what it survives."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

import layerzero as lz
from layerzero._ops.signature import PUBLIC, public_op
from layerzero_cli import output
from layerzero_cli.output import Cell, Line, Table
from layerzero_cli.root import COMMANDS, VERBS, cli, entries
from tools import faulty_plugins as faults
from tools.lz_program import data, run

pytestmark = pytest.mark.usefixtures("clean")


def program(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The real program in its own process, piped."""
    return subprocess.run(
        [sys.executable, "-m", "layerzero_cli", *args],
        capture_output=True, text=True, timeout=240, check=False, env={**os.environ, **env},
    )  # fmt: skip


def with_commands(site: Path, monkeypatch: pytest.MonkeyPatch, name: str, body: str) -> None:
    """Install a package whose metadata names the verb `name`, declared by a module with this text."""
    (site / f"verbs_of_{name}.py").write_text(body, encoding="utf-8")
    info = site / f"verbs_of_{name}-1.0.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: verbs-of-{name}\nVersion: 1.0\nSummary: Something like {name}.\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    entries = f"[layerzero.commands]\n{name} = verbs_of_{name}:command\n"
    (info / "entry_points.txt").write_text(entries, encoding="utf-8")


# -- the program -------------------------------------------------------------------------------------------------
def test_the_program_answers_with_its_version_and_lists_its_verbs() -> None:
    assert run("--version").stdout.startswith(f"layerzero {lz.__version__} (torch ")
    text = run("--help").stdout
    for verb in (
        "doctor",
        "list",
        "explain",
        "which",
        "validate",
        "policy",
        "plugin",
        "readiness",
        "demo",
        "completion",
    ):
        assert f"\n  {verb} " in text


@pytest.mark.parametrize("op", sorted(PUBLIC))
def test_every_op_has_a_documentation_page(op: str) -> None:
    text = data("list", "--op", op, "--page")["page"]
    assert text.startswith(f"# lz.ops.{op}\n") and f"lz.ops.{op}(" in text and f"`reference.{op}.plain`" in text
    assert all(f"| `{name}` | " in text for name in public_op(op).arguments)


def test_a_page_needs_an_op_that_exists() -> None:
    assert "--page needs --op" in run("list", "--page", code=2).stderr
    assert "rms_norm" in run("list", "--op", "rms_nrom", "--page", code=2).stderr


def test_an_unknown_verb_is_a_usage_error_that_names_the_nearest() -> None:
    assert "No such command 'dcotor'. Did you mean 'doctor'?" in run("dcotor", code=2).stderr
    assert "No such command 'xyzzy'.\n" in run("xyzzy", code=2).stderr


def test_help_groups_verbs_by_task_and_options_of_a_call_by_what_they_describe() -> None:
    text = run("--help").stdout
    places = [text.index(f"\n{task}:\n") for task in VERBS]
    assert places == sorted(places)
    for verb in ("explain", "which", "validate", "bench"):
        shown = run(verb, "--help").stdout
        headings = [shown.index(f"\n{heading}:\n") for heading in ("Shapes", "Attention", "Other ops", "Options")]
        assert headings == sorted(headings) and "--json" in shown[headings[-1] :] and f"lz {verb} " in shown


@pytest.mark.parametrize(
    ("verb", "listed"), [(name, told[1]) for verbs in VERBS.values() for name, told in verbs.items()]
)
def test_every_verb_says_in_whole_sentences_what_it_does(verb: str, listed: str) -> None:
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None and " ".join((command.help or "").partition("\n\n")[0].split()) == listed
    inner = command.commands.values() if isinstance(command, click.Group) else [command]
    for item in [command, *inner]:
        first = (item.help or "").partition("\n\n")[0].strip()
        assert first[:1].isupper() and first.endswith("."), f"{verb} {item.name}: {first}"


def test_entry_points_are_those_of_importlib_metadata(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    with_commands(site, monkeypatch, "own", "import click\n\n@click.command()\ndef own(): pass\n")
    broken = site / "verbs_of_nobody-1.0.dist-info"
    broken.mkdir()
    (broken / "entry_points.txt").write_text(
        f"[{COMMANDS}]\n# nothing = yet\nnobody = nowhere:at.all\n\n[other]\nx = y:z\n"
    )
    for group in (COMMANDS, "layerzero.backends"):
        wanted = {item.name: item.value for item in importlib.metadata.entry_points(group=group)}
        assert {name: value for name, (value, _) in entries(group).items()} == wanted and len(wanted) >= 3
    assert re.search(r"nobody +verbs_of_nobody \(verbs_of_nobody\)", run("--help").stdout), "without its metadata"


_QUICK = [
    ["--help"],
    ["explain", "--help"],
    ["tune", "--help"],
    ["dcotor"],
    ["policy", "chekc"],
    ["explain", "--shpe", "1"],
    ["bench", "rms_norm", "--shape", "four"],
]


@pytest.mark.parametrize("words", _QUICK, ids=" ".join)
def test_help_and_mistakes_of_usage_import_neither_torch_nor_the_library(words: list[str]) -> None:
    assert not _imported(words) & {"torch", "layerzero", "rich", "yaml"}


def test_the_list_of_verbs_imports_no_verb() -> None:
    found = {name for name in _imported(["--help"]) if name.startswith("layerzero")}
    assert found == {"layerzero_cli", "layerzero_cli.root", "layerzero_cli.output", "layerzero_cli.verbs"}


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("lz ex", "explain"),
        ("lz explain paged", "paged_attention"),
        ("lz explain --device h1", "h100"),
        ("lz list --backend sd", "sdpa"),
        ("lz validate sdpa.attention.flash_c", "sdpa.attention.flash_cpu"),
    ],
)
def test_completion_imports_neither_torch_nor_a_plugin(words: str, found: str) -> None:
    env = {"_LZ_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    assert found in program(**env).stdout
    assert not _imported([], **env) & {"torch", "pluggy"}


def _imported(words: list[str], **env: str) -> set[str]:
    """The modules that the program has imported when it ends."""
    code = (
        "import atexit, sys; from layerzero_cli import main; sys.argv = ['lz', *sys.argv[1:]]\n"
        "atexit.register(lambda: print('modules', *sys.modules, file=sys.stderr)); main()"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *words],
        capture_output=True, text=True, timeout=240, check=False, env={**os.environ, **env},
    )  # fmt: skip
    return set(done.stderr.rpartition("modules ")[2].split())


_VERBS = [
    ["doctor", "--no-probe"],
    ["list"],
    ["explain", "rms_norm", "--shape", "4,64"],
    ["which", "rms_norm", "--shape", "4,64"],
    ["validate", "torch.rms_norm.native", "--shape", "4,64"],
    ["policy", "show"],
    ["policy", "schema"],
    ["plugin", "list"],
    ["plugin", "schema"],
    ["readiness"],
    ["completion", "bash"],
]


@pytest.mark.parametrize("words", _VERBS, ids=" ".join)
def test_every_verb_is_plain_when_piped_and_valid_json_when_asked(words: list[str]) -> None:
    result = run(*words)
    assert result.stdout.strip() and "\x1b" not in result.output
    assert not any(line != line.rstrip() for line in result.stdout.splitlines() if words[0] != "completion")
    asked = run(*words, "--json")
    assert json.loads(asked.stdout) is not None and asked.stderr == ""


def test_a_chatty_plugin_spoils_neither_json_nor_plain_text(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.install(site, "healthy", "chatty")
    plugin = site / "faulty_chatty" / "plugin.py"
    plugin.write_text("print('hello from a banner')\n" + plugin.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setenv("LAYERZERO_PLUGINS", "chatty")
    lz.reset()
    result = run("plugin", "list", "--json")
    assert [
        item["name"] for item in json.loads(result.stdout)["items"] if not item["builtin"] and item["state"] == "ok"
    ] == ["chatty"]
    assert "banner" in result.stderr


@pytest.mark.req("R-OPS-01")
def test_the_real_program_survives_a_crashing_vendor_and_a_broken_plugin(site: Path) -> None:
    for kind in ("crashes_in_probe", "raises_at_import"):
        faults.install(site, kind)
    env = {
        "LAYERZERO_PLUGINS": "crashes_in_probe,raises_at_import",
        "LAYERZERO_PLUGINS_DENY": "reference,sdpa,torch",  # their probes are looked at elsewhere, and take a while
        "LAYERZERO_PERFER": "sdpa",
    }
    done = program("doctor", "--json", "--timeout", "60", **env)
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["ok"] is False, done.stderr
    failed = {(check["group"], check["name"]): check for check in report["checks"] if check["status"] == "fail"}
    assert failed["backends", "crashes_in_probe"]["code"] == "BACKEND_PROBE_CRASHED"
    assert failed["plugins", "raises_at_import"]["code"] == "PLUGIN_IMPORT_FAILED"
    assert all(check["fix"] for check in failed.values())
    assert len(failed) == 2


def test_a_wrong_setting_stops_other_verbs_with_one_message_but_not_doctor(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("]: [", encoding="utf-8")
    env = {"LAYERZERO_CONFIG": str(bad)}
    stopped = program("list", **env)
    assert stopped.returncode == 1 and stopped.stdout == ""
    assert "bad.yaml" in stopped.stderr and "Traceback" not in stopped.stderr
    looked = program("doctor", "--no-probe", **env)
    assert looked.returncode == 1 and "bad.yaml" in looked.stdout and "Traceback" not in looked.stderr
    assert "\x1b" not in looked.stdout


def test_debug_shows_the_traceback_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" not in run("explain", "nothing", "--shape", "1,2", code=2).stderr
    monkeypatch.setenv("LAYERZERO_DEBUG", "1")
    assert "Traceback" in run("explain", "nothing", "--shape", "1,2", code=2).stderr


def test_an_error_that_is_not_ours_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(lz, "list_kernels", broken)
    result = run("list", code=1)
    assert "ZeroDivisionError: a mistake of ours" in result.stderr and "Traceback" not in result.output
    assert json.loads(run("list", "--json", code=1).stdout)["error"]["message"].startswith("ZeroDivisionError")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_full_disk_under_the_answer_is_one_line(more: list[str]) -> None:
    words = [sys.executable, "-m", "layerzero_cli", "completion", "bash", *more]
    with open("/dev/full", "w") as full:
        found = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=240, check=False)
    assert found.returncode == 1 and "Traceback" not in found.stderr, found.stderr
    assert "No space left" in found.stderr and "make room" in found.stderr and "should not" not in found.stderr


def test_a_closed_output_spoils_neither_work_nor_exit_code() -> None:
    words = f"{sys.executable} -m layerzero_cli explain nothing --shape 1,2"
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        found = subprocess.run(
            f"{words} {closed}", shell=True, capture_output=True, text=True, timeout=240, check=False
        )
        assert found.returncode == 2 and "AttributeError" not in found.stderr, found.stderr


def test_any_failure_of_click_is_json_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise click.ClickException("it cannot be done")

    monkeypatch.setattr(lz, "list_kernels", broken)
    assert data("list", code=1)["error"]["message"] == "it cannot be done"


# -- verbs -------------------------------------------------------------------------------------------------------
@pytest.mark.req("R-API-19", "R-OPS-01")
def test_list_shows_each_kernel_once_and_says_which_can_be_used_here() -> None:
    listed = data("list")
    assert [item["kernel_id"] for item in listed] == [kernel.kernel_id for kernel in lz.list_kernels()]
    by_id = {item["kernel_id"]: item for item in listed}
    assert by_id["reference.attention.plain"]["available"] is True
    here = data("list", "--available")
    assert here and all(item["available"] for item in here)
    assert len(here) + len(data("list", "--unavailable")) == len(listed)
    assert {item["op"] for item in data("list", "--op", "attention")} == {"attention"}
    assert {item["backend"] for item in data("list", "--backend", "sdpa")} == {"sdpa"}
    assert "sdpa" in run("list", "--backend", "sdap", code=2).stderr
    assert "attention" in run("list", "--op", "attenton", code=2).stderr


@pytest.mark.req("R-OPS-01", "R-API-19")
def test_list_names_the_reason_of_a_kernel_that_cannot_be_used(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from layerzero_verify.testing.fakes import capabilities

    faults.install(site, "healthy", "bare", descriptor=capabilities("bare", vendor={"dist": "no-such-dist"}))
    monkeypatch.setenv("LAYERZERO_PLUGINS", "bare")
    lz.reset()
    (item,) = data("list", "--backend", "bare")
    assert item["available"] is False and item["reasons"][0]["code"] == "BACKEND_NOT_INSTALLED"
    assert data("list", "--backend", "bare", "--available") == []
    assert [kernel.kernel_id for kernel in lz.list_kernels(backend="bare", available=False)] == [item["kernel_id"]]
    usable = lz.list_kernels(available=True)
    assert usable and "bare" not in {kernel.backend for kernel in usable}
    check = lz.doctor("bare", probe=False).check("bare", "backends")
    assert (check.status, check.code) == ("warn", "BACKEND_NOT_INSTALLED") and check.fix
    assert "BACKEND_NOT_INSTALLED" in run("list", "--backend", "bare").stdout


def test_doctor_may_show_problems_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERZERO_PERFER", "x")
    text = run("doctor", "--no-probe", "--problems").stdout
    assert "LAYERZERO_PERFER" in text and "python" not in text


def test_doctor_of_one_backend_leaves_with_one_when_it_is_not_there() -> None:
    assert data("doctor", "quux", code=1)["checks"][0]["code"] == "BACKEND_NOT_INSTALLED"


def test_readiness_judges_a_file_and_leaves_with_its_verdict(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('[locks]\nrms_norm = "torch.rms_norm.nativ"\n', encoding="utf-8")
    result = run("readiness", "--config", str(file), code=1)
    assert "did you mean torch.rms_norm.native?" in result.stdout
    assert data("readiness", "--config", str(file), code=1)["ok"] is False
    file.write_text('[locks]\nrms_norm = "torch.rms_norm.native"\n', encoding="utf-8")
    assert data("readiness", "--config", str(file))["ok"] is True


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_ask_the_program(shell: str) -> None:
    assert "_LZ_COMPLETE" in run("completion", shell).stdout
    assert data("completion", shell)["script"].strip() == run("completion", shell).stdout.strip()


def test_the_shell_completes_ops_devices_and_verbs() -> None:
    words = {"_LZ_COMPLETE": "bash_complete", "COMP_WORDS": "lz explain paged", "COMP_CWORD": "2"}
    result = CliRunner().invoke(cli, [], env=words, prog_name="lz")
    assert "paged_attention" in result.output


def test_demo_is_handed_its_options_and_its_exit_code_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from layerzero_tune.cli import demo

    seen: dict[str, Any] = {}

    def take(**options: Any) -> int:
        seen.update(options)
        return 1

    monkeypatch.setattr(demo, "run", take)
    run("demo", "--quick", "--html", str(tmp_path / "page.html"), code=1)
    assert seen == {"html": tmp_path / "page.html", "json": False, "device": None, "quick": True}


# -- plugins -----------------------------------------------------------------------------------------------------
def test_plugin_new_writes_a_package_and_never_over_one(tmp_path: Path) -> None:
    found = data("plugin", "new", "mybackend", "--dir", str(tmp_path))
    assert Path(found["path"]) == tmp_path / "layerzero-mybackend"
    assert "src/layerzero_mybackend/capabilities.json" in found["files"]
    assert all(Path(found["path"], file).is_file() for file in found["files"])
    assert "exists already" in run("plugin", "new", "mybackend", "--dir", str(tmp_path), code=2).stderr
    assert "cannot be the name" in run("plugin", "new", "My Backend", "--dir", str(tmp_path), code=2).stderr


def test_plugin_list_names_state_reason_and_fix(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.install(site, "bad_capabilities")
    monkeypatch.setenv("LAYERZERO_PLUGINS", "bad_capabilities")
    lz.reset()
    found = {item["name"]: item for item in data("plugin", "list")}
    assert found["bad_capabilities"]["state"] == "failed"
    assert found["bad_capabilities"]["reasons"][0]["code"] == "SCHEMA_FIELD_UNKNOWN"
    text = run("plugin", "list").stdout
    assert "platfroms" in text and "LAYERZERO_PLUGINS_DENY" in text
    assert "did you mean platforms?" in " ".join(text.split()), "what its author needs"
    assert "(did you mean platforms?)" in str(lz.doctor("bad_capabilities", probe=False).checks[0].fix)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the fakes run on the CPU, which is not the first device here")
def test_plugin_check_probes_one_plugin(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.install(site, "fails_health")
    monkeypatch.setenv("LAYERZERO_PLUGINS", "fails_health")
    lz.reset()
    found = data("plugin", "check", "fails_health", "--timeout", "60", code=1)
    assert {check["code"] for check in found["checks"]} == {None, "HEALTH_CHECK_FAILED", "FIRST_USE_UNCHECKED"}


@pytest.mark.slow
def test_plugin_check_runs_the_kit_on_a_new_package(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Path(data("plugin", "new", "fresh", "--dir", str(site))["path"])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(made / "src"), str(site)]))
    monkeypatch.syspath_prepend(str(made / "src"))
    info = site / "layerzero_fresh-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: layerzero-fresh\nVersion: 0.1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[layerzero.backends]\nfresh = layerzero_fresh.plugin\n", encoding="utf-8")
    monkeypatch.setenv("LAYERZERO_PLUGINS", "fresh")
    lz.reset()
    found = data("plugin", "check", "fresh", "--kit", "--timeout", "60")
    assert found["ok"] and found["kit"]["failed"] == [] and "passed" in found["kit"]["summary"]


def test_a_package_brings_its_own_verb_which_help_does_not_import(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "import click\ncommand = click.Command('greet', callback=lambda: click.echo('hello'))\n"
    with_commands(site, monkeypatch, "greet", body)
    with_commands(site, monkeypatch, "doctor", body)
    shown = run("--help").stdout
    assert "Something like greet. (verbs-of-greet)" in shown and "like doctor" not in shown
    assert "verbs_of_greet" not in sys.modules
    assert run("greet").stdout == "hello\n"
    assert "Check machine" in run("doctor", "--help").stdout


@pytest.mark.parametrize(
    ("body", "told"),
    [("raise RuntimeError('no hub today')", "no hub today"), ("command = lambda group: None", "declares no command")],
)
def test_a_broken_verb_costs_only_itself(site: Path, monkeypatch: pytest.MonkeyPatch, body: str, told: str) -> None:
    with_commands(site, monkeypatch, "clumsy", body)
    assert "clumsy" in run("--help").stdout
    assert told in run("clumsy", code=1).stderr
    assert run("which", "rms_norm", "--shape", "4,8").stderr == ""


# -- printing ----------------------------------------------------------------------------------------------------
class Stream:
    def __init__(self, *, tty: bool, encoding: str = "utf-8") -> None:
        self.text, self.tty, self.encoding = "", tty, encoding

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return self.tty


_BLOCKS = [Line("title", "bold"), Table(("name", "n"), [(Cell("a", "green"), "1"), ("longer", "22→")], right={1})]


def test_a_terminal_gets_colours_and_a_pipe_gets_aligned_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal, pipe = Stream(tty=True), Stream(tty=False)
    output.show(_BLOCKS, terminal)
    output.show(_BLOCKS, pipe)
    assert "\x1b[" in terminal.text and "longer" in terminal.text
    assert pipe.text == "title\nNAME      N\na         1\nlonger  22→\n"
    monkeypatch.setenv("NO_COLOR", "1")
    quiet = Stream(tty=True)
    output.show(_BLOCKS, quiet)
    assert quiet.text == pipe.text


def test_an_ascii_locale_gets_plain_arrows() -> None:
    stream = Stream(tty=False, encoding="ascii")
    output.show([Line("→ do this – now, ünder 5 µs")], stream)
    assert stream.text == "-> do this - now, ?nder 5 us\n"


def test_importing_the_library_does_not_import_the_command_line() -> None:
    code = "import sys, layerzero; sys.exit(bool({'click', 'rich', 'layerzero_cli'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=240).returncode == 0
    assert isinstance(cli, click.Group)
