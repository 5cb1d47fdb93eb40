"""How the conformance kit shares these kernels out among processes: what is compiled alike is tried in one of them.

Asked of a process of its own: the suite is made of tests, which must not be collected here as well.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict

import pytest

# The plugin as it is on an H200 with all its libraries: calls are described there, nothing is run.
SCRIPT = """
import json, torch
from layerzero_verify.testing.pytest_plugin import GROUPS, Kit
from layerzero.device.catalogue import named_device
from layerzero_verify.testing.cases import cases_of, dtypes_of
from layerzero_verify.testing.run import context
from layerzero_verify.testing.suite.shards import shard

h200, cpu = named_device("h200"), torch.device("cpu")
kit = Kit.open("layerzero_flashattn.plugin")
kit.device_for = lambda spec: "not here" if spec.check_device(h200) else (cpu, h200)
wanted = [spec for spec in kit.kernels if spec.backend in ("flashattn3", "flashattn4")]
here = [spec for spec in wanted if kit.device_for(spec) != "not here"]
cases = []
for spec in here:
    for group in (item for groups in GROUPS.values() for item in groups):
        if group.op == spec.op and group.requires <= spec.features and dtypes_of(spec):
            for case in cases_of(group, spec):
                ctx = context(kit, case, case.arguments(cpu))
                values = [spec.backend, spec.op, *(str(ctx.get(name)) for name in spec.jit_key)]
                cases.append([spec.kernel_id, bool(spec.jit_key), values, shard(kit, spec, case)])
print(json.dumps({"cases": cases, "kernels": {spec.kernel_id: shard(kit, spec) for spec in here}}))
"""


@pytest.fixture(scope="module")
def told():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_one_configuration_is_one_group_and_another_is_another(told):
    groups, values = defaultdict(set), defaultdict(set)
    for _, compiled, described, group in told["cases"]:
        assert not set(group) & set("@]"), "xdist splits there"
        if compiled:
            groups[group].add(tuple(described))
            values[tuple(described)].add(group)
    assert len(groups) > 40
    assert all(len(found) == 1 for found in (*groups.values(), *values.values()))


def test_kernels_that_differ_in_options_share_what_is_compiled(told):
    """And a test of the kernel as such goes where its plain case goes."""
    plain, deterministic = (told["kernels"][f"flashattn4.attention.sm90{end}"] for end in ("", "_deterministic"))
    assert plain == deterministic
    assert plain in {group for kernel, _, _, group in told["cases"] if kernel == "flashattn4.attention.sm90"}


def test_a_kernel_that_is_not_compiled_is_a_group_of_its_own(told):
    mine = {kernel: group for kernel, compiled, _, group in told["cases"] if not compiled}
    assert "flashattn3.attention.sm90" in mine
    assert all(group == kernel == told["kernels"][kernel] for kernel, group in mine.items())
