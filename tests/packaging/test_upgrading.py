"""What release 0.1 left behind is read, and what is not kept is refused with what to do (docs/upgrading.md).

The files of `from_0_1` were written by the programs of 0.1 on an x86 machine; policy.yaml by hand, and read by them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from layerzero.errors import PluginError
from layerzero.perfdb.store import PerfDB
from layerzero.plugin import API_VERSION
from layerzero.plugin.registrar import check_api
from layerzero.plugin.versions import contains
from layerzero.recording.traffic import load
from layerzero.registry.fields import DEFAULT_API
from layerzero.tables.file import load_table

OLD = Path(__file__).resolve().parent / "from_0_1"
TABLE = json.loads((OLD / "table.json").read_text(encoding="utf-8"))


def test_a_perfdb_is_read_with_every_row(tmp_path: Path):
    shutil.copy2(OLD / "perf.db", tmp_path / "perf.db")
    found = {row.kernel_id: row for row in PerfDB(tmp_path / "perf.db").all()}
    names = ("cpu.{}.rows", "torch.{}.native", "reference.{}.plain")
    assert set(found) == {name.format(op) for op in ("rms_norm", "silu_and_mul") for name in names}
    for plan in TABLE["plans"]:
        assert found[plan["ops"][0]["kernel_id"]].median_us == plan["ops"][0]["median_us"]


def test_a_dispatch_table_is_read_and_its_hash_is_the_one_written():
    table = load_table(OLD / "table.json")
    assert table.content_hash == TABLE["content_hash"]
    assert [entry.kernel_id for entry in table.entries] == ["cpu.rms_norm.rows", "cpu.silu_and_mul.rows"]


def test_recorded_traffic_is_read():
    assert [(call.context.op, call.count) for call in load(OLD / "traffic.json").calls] == [
        ("rms_norm", 2),
        ("silu_and_mul", 2),
    ]


def test_a_lock_of_a_policy_file_holds():
    ask = "import layerzero as lz, torch; print(lz.which('rms_norm', torch.ones(2, 8), torch.ones(8)))"
    env = os.environ | {"LAYERZERO_CONFIG": str(OLD / "policy.yaml")}
    done = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "reference.rms_norm.plain", done.stderr[-1500:]


@pytest.mark.parametrize("pinned", ["==0.1", ">=0.1,<0.2", ">=1,<2", "~=1.0"])
def test_a_backend_pinned_to_an_earlier_plugin_api_is_refused_with_what_to_do(pinned: str):
    with pytest.raises(PluginError) as refused:
        check_api(pinned, "layerzero-acme")
    assert refused.value.code == "PLUGIN_API_MISMATCH"
    said = str(refused.value)
    assert f"layerzero-acme is written for plugin API {pinned}, this core has {API_VERSION}" in said
    assert "upgrade the plugin, or install the layerzero-core it was made for" in said and "docs/upgrading.md" in said


def test_a_backend_that_names_no_api_or_this_one_is_taken():
    assert contains(DEFAULT_API, API_VERSION)
    check_api(DEFAULT_API, "layerzero-acme")
    check_api(">=2", "layerzero-acme")
