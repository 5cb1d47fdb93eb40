"""A small real backend of two folders: the plugin on everybody's path, its vendor only where isolation says.

Run by children of the tests, so everything that can go wrong in a vendor can be asked of it.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

__all__ = ["FAULTS", "install"]

FAULTS = (
    "segfault", "killed", "exits", "hangs", "garbage", "flipped", "half", "silent", "out_of_memory", "raises", "quits",
)  # fmt: skip

_VENDOR = '''
"""The vendor: correct arithmetic, and every way a library can end badly."""
import os, resource, signal, struct, sys, time, zlib
import torch
import torch.nn.functional as F

SEEN = {"quarrel": __import__("importlib.util", fromlist=["util"]).find_spec("quarrel") is not None}

def attention(query, key, value, mask, dropout_p, is_causal, scale, window, softcap, alibi, return_lse):
    trouble = None if scale is None else WHAT.get(round(scale))
    if trouble is not None:
        trouble()
    return F.scaled_dot_product_attention(query, key, value, mask, 0.0, bool(is_causal), scale=scale,
                                          enable_gqa=query.shape[1] != key.shape[1])

def rms_norm(x, weight, eps):
    return F.rms_norm(x, (x.shape[-1],), weight, eps)

def echo(*args, **kwargs):
    return (list(args), os.getpid()) if not kwargs else (list(args), sorted(kwargs))

def environ(name): return os.environ.get(name)
def path(): return list(sys.path)
def sees(module):
    import importlib.util
    return importlib.util.find_spec(module) is not None
def grows(x, times): return x.repeat(times)
def sleeps(seconds):
    time.sleep(seconds)
    return os.getpid()
def draws(x): return torch.rand(4)

def _write(data):
    os.write(int(sys.argv[1]), data)

def segfault(): os.kill(os.getpid(), signal.SIGSEGV); time.sleep(60)
def killed(): os.kill(os.getpid(), signal.SIGKILL)
def exits(): os._exit(7)
def hangs(): os.kill(os.getpid(), signal.SIGSTOP)
def garbage(): _write(os.urandom(4096)); time.sleep(60)
def _frame():
    from layerzero.isolation.wire import Kind, encode
    return bytearray(encode(Kind.RESULT, 1, {"result": None}))
def flipped():
    frame = _frame(); frame[-2] ^= 1
    _write(bytes(frame)); time.sleep(60)
def half(): _write(bytes(_frame()[:30])); os._exit(0)
def silent(): os.close(int(sys.argv[1])); time.sleep(60)
def out_of_memory():
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + (64 << 20), before[1]))
    try:
        torch.zeros(1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
def raises(): raise ValueError("the vendor does not like this")
def quits(): sys.exit("the vendor wants to leave")

FAULTS = ("segfault", "killed", "exits", "hangs", "garbage", "flipped", "half", "silent", "out_of_memory", "raises",
          "quits")
WHAT = {100 + i: globals()[name] for i, name in enumerate(FAULTS)}
'''

_PLUGIN = """
from pathlib import Path
from layerzero.plugin import HealthReport, hookimpl, vendor_status

CAPABILITIES = Path(__file__).with_name("capabilities.json")

@hookimpl
def layerzero_register(registrar):
    registrar.backend(CAPABILITIES)

@hookimpl
def layerzero_capabilities(device):
    return vendor_status(CAPABILITIES, device)

@hookimpl
def layerzero_health(backend):
    import toyvendor
    seen = toyvendor.SEEN["quarrel"]
    return HealthReport(backend, not seen, "sees its neighbour" if seen else "alone")
"""

_KERNELS = """
import toyvendor
if toyvendor.SEEN["quarrel"]:
    raise ImportError("toyvendor cannot live beside quarrel")
attention, rms_norm = toyvendor.attention, toyvendor.rms_norm
"""

_CAPABILITIES = {
    "schema_version": "1.0",
    "backend": "toy",
    "platforms": ["cpu"],
    "vendor": {"dist": "toyvendor", "import": "toyvendor", "version": ">=1,<2"},
    "conflicts": [{"dist": "quarrel", "module": "quarrel", "why": "they share a name"}],
    "isolation": {"hide": ["quarrel"]},
    "ops": {
        "attention": [
            {
                "kernel_id": "toy.attention.plain", "function": "layerzero_toy.kernels:attention",
                "dtypes": ["float32", "float16", "bfloat16"], "layouts": ["BHSD"], "attn_mask": ["bool", "float"],
                "causal": ["top_left"], "gqa": True, "backward": True, "graph_safe": True, "priority": 95,
                "adapt": ["layout", "mask"],
            }
        ],
        "rms_norm": [
            {
                "kernel_id": "toy.rms_norm.plain", "function": "layerzero_toy.kernels:rms_norm",
                "dtypes": ["float32"], "priority": 95,
            }
        ],
    },
}  # fmt: skip


def _dist(folder: Path, name: str, version: str, entry_points: str = "") -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points)


def install(site: Path, vendor_home: Path | None, *, quarrel: bool = False, version: str = "1.5") -> None:
    """The plugin into `site`, the vendor into `vendor_home` (None: nowhere), its neighbour into `site` if asked for."""
    package = site / "layerzero_toy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "plugin.py").write_text(textwrap.dedent(_PLUGIN))
    (package / "kernels.py").write_text(textwrap.dedent(_KERNELS))
    (package / "capabilities.json").write_text(json.dumps(_CAPABILITIES))
    _dist(site, "layerzero-toy", "0.1.0", "[layerzero.backends]\ntoy = layerzero_toy.plugin\n")
    if vendor_home is not None:
        vendor_home.mkdir(parents=True, exist_ok=True)
        (vendor_home / "toyvendor.py").write_text(textwrap.dedent(_VENDOR))
        _dist(vendor_home, "toyvendor", version)
    if quarrel:
        (site / "quarrel.py").write_text("raise ImportError('nobody imports this')\n")
        _dist(site, "quarrel", "4.0")
