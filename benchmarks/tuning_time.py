"""How long `lz tune` takes for the recorded traffic of a Qwen3-class model, and how soon another machine is ready.

    python benchmarks/tuning_time.py [--device cuda|cpu] [--json FILE] [--limits 140 40] [--folder DIR]
                                     [--stages empty,artifacts,warm] [-- OPTIONS OF lz tune]

The model is made from its configuration, with random weights, and run once under `lz.record`: a prompt of 500 tokens,
and decode steps of one and of 24 sequences. Its calls are tuned twice, each time by a process of its own and into a new
database: with no compiled kernel anywhere, and with all that the first has left (`--no-compile`: what the first could
not compile in time is `late` there, and not looked for again). A run that takes longer than its limit is interrupted as
Ctrl-C does, and what it has done is kept. Then the warm start, by the times of the run that reached most calls
(LAYERZERO_PERFDB): what the traffic needs is packed (`lz warmup --pack`), unpacked into an empty cache, and a process
that knows this cache alone serves 1 000 requests (one forward pass each) with background compiles allowed; counted are
the files that appear in the cache meanwhile. The goals, of an H200, stand beside the seconds. On a CPU the model is a
small one, and there are no goals.

With `--folder` the traffic, the cache and the times stay there, and `--stages` may be run one after the other, by
commands of their own: each adds to what FILE holds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from timing import commit, machine, write_json

GOALS_S = {"empty cache": 120.0, "with artifacts": 20.0}
STAGES = ("empty", "artifacts", "warm")
UNPACK_GOAL_S = 5.0
REQUESTS = 1000
STEPS = 4
COMPILED = {".cubin", ".so", ".o", ".ptx"}  # what a compiler leaves, whichever library called it
BATCH = 24
QWEN3: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 14,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
}  # fmt: skip
SMALL = {
    **QWEN3, "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip


def passes(device: str, file: Path | None) -> Iterator[None]:
    """Forward passes of the model: a prompt and steps of one sequence, then of 24, and again; recorded into `file`."""
    import torch
    from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

    import layerzero as lz

    config = Qwen3Config(**(QWEN3 if device == "cuda" else SMALL), attn_implementation="sdpa")
    length = 500 if device == "cuda" else 50
    torch.manual_seed(0)
    with torch.device(device), torch.no_grad():
        made = Qwen3ForCausalLM(config).to(torch.bfloat16 if device == "cuda" else torch.float32).eval()
        model = lz.patch(made)
        for batch in itertools.cycle((1, BATCH)):
            cache = DynamicCache()
            ids = torch.randint(0, config.vocab_size, (batch, length))
            with contextlib.nullcontext() if file is None or batch > 1 else lz.record(file):
                model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            yield
            with contextlib.nullcontext() if file is None else lz.record(file):
                for _ in range(STEPS):
                    model(ids[:, :1], past_key_values=cache, use_cache=True, logits_to_keep=1)
                    yield


def record(file: Path, device: str) -> None:
    """Write the calls of the model: in a process of its own, in which nothing is compiled. The prompts of the batch are
    not recorded."""
    for _ in itertools.islice(passes(device, file), 2 * (1 + STEPS)):
        pass


def serve(requests: int, device: str) -> None:
    """Print what a server meets: files of compiled kernels that were not there, and the kernels its calls got."""
    from layerzero.jit.cache import is_passing
    from layerzero.plugin.artifacts import cache_folder

    def kept() -> set[str]:
        found = (path for path in cache_folder().rglob("*") if path.is_file() and not is_passing(path.name))
        return {str(path.relative_to(cache_folder())) for path in found if path.suffix in COMPILED}

    before, began = kept(), time.monotonic()
    for _ in itertools.islice(passes(device, None), requests):
        pass
    new = sorted(kept() - before)
    found = {"requests": requests, "seconds": round(time.monotonic() - began, 1), "compiles": len(new), "new": new[:20]}
    print(json.dumps({**found, "compiled_before": len(before)}), flush=True)


def warm_start(traffic: Path, folder: Path, device: str, times: Path) -> dict[str, Any]:
    """Pack what the traffic needs, unpack it into an empty cache, serve from there; all by the tuned `times`."""
    from layerzero.jit.cache import DEEP_FOLDERS, VENDOR_FOLDERS

    given = {key: value for key, value in os.environ.items() if key not in {**VENDOR_FOLDERS, **DEEP_FOLDERS}}
    there, here = folder / "jit", folder / "unpacked"
    pack, key = folder / "kernels.lzpack", folder / "key"
    key.write_text(secrets.token_hex(32))
    lz = [sys.executable, "-m", "layerzero_cli", "warmup", "--json", "--key", str(key)]
    own = [sys.executable, __file__, "--device", device, "--serve", str(REQUESTS)]
    steps = (
        ("pack", [*lz, str(traffic), "--pack", str(pack)], there, 60.0),
        ("unpack", [*lz, "--unpack", str(pack)], here, 30.0),
        ("serve", own, here, 90.0),
    )
    found: dict[str, Any] = {}
    for name, command, cache, limit in steps:
        began = time.monotonic()
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, timeout=limit, check=False,
                env={**given, "LAYERZERO_JIT_CACHE_DIR": str(cache), "LAYERZERO_PERFDB": str(times)},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return found | {name: {"seconds": limit, "interrupted": True}}
        told = json.loads(done.stdout) if done.stdout.strip().startswith("{") else {}
        found[name] = {"seconds": round(time.monotonic() - began, 1), "exit_code": done.returncode}
        found[name] |= told if name == "serve" else {"bytes": pack.stat().st_size} if pack.exists() else {}
        if not pack.exists():
            return found
    if device == "cuda":
        ready = found["unpack"]["exit_code"] == 0 and found["unpack"]["seconds"] <= UNPACK_GOAL_S
        found |= {"goal_s": UNPACK_GOAL_S, "met": ready and found["serve"].get("compiles") == 0}
    return found


def database(folder: Path, name: str) -> Path:
    """Where the times of a run lie."""
    return folder / f"{name.replace(' ', '_')}.db"


def tuned(traffic: Path, folder: Path, name: str, device: str, limit_s: float, options: list[str]) -> dict[str, Any]:
    """One run of `lz tune`: its wall seconds, and what it says."""
    from layerzero.jit.cache import DEEP_FOLDERS, VENDOR_FOLDERS

    given = {key: value for key, value in os.environ.items() if key not in {**VENDOR_FOLDERS, **DEEP_FOLDERS}}
    command = [sys.executable, "-m", "layerzero_cli", "tune", str(traffic), "--json", "--device", device,
               "--database", str(database(folder, name)), *options]  # fmt: skip
    began = time.monotonic()
    child = subprocess.Popen(
        command, env={**given, "LAYERZERO_JIT_CACHE_DIR": str(folder / "jit")}, stdout=subprocess.PIPE, text=True
    )
    interrupted = False
    try:
        out, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        interrupted = True
        child.send_signal(signal.SIGINT)
        try:
            out, _ = child.communicate(timeout=20.0)
        except subprocess.TimeoutExpired:
            child.kill()
            out, _ = child.communicate()
    seconds = time.monotonic() - began
    told = json.loads(out) if out.strip().startswith("{") else {}
    calls = told.get("calls", [])
    return {
        "seconds": round(seconds, 1), "interrupted": interrupted, "exit_code": child.returncode,
        "calls": len(calls), "left": len(told.get("left", [])), "against_torch": told.get("against_torch"),
        "changed": len(told.get("changed", {})),
        "raced": sum(len(item.get("kernels", {})) for item in calls),
        "ruled_out": sum(len(item.get("ruled_out", {})) for item in calls),
        "late": {item["name"]: late for item in calls if (late := item.get("not_compiled_in_time"))},
        "refused": {item["name"]: item["refused"] for item in calls if item.get("refused")},
        "skipped": {item["name"]: item["skipped"] for item in calls if "skipped" in item},
        "seconds_of_calls": {item["name"]: item["seconds"] for item in calls if "seconds" in item},
        "choices": {item["name"]: item["choice"] for item in calls if "choice" in item},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None, help="cpu or cuda; default: cuda where there is one")
    parser.add_argument("--json", type=Path, default=Path("build/tuning_time.json"))
    parser.add_argument("--limits", type=float, nargs=2, default=(140.0, 40.0), help="seconds of each run, at most")
    parser.add_argument("--folder", type=Path, help="where everything stays; default: a folder that is removed")
    parser.add_argument("--stages", default=",".join(STAGES), help="of empty,artifacts,warm")
    parser.add_argument("--record", type=Path, help="only write the calls of the model to this file")
    parser.add_argument("--serve", type=int, help="only serve so many requests")
    parser.add_argument("options", nargs="*", help="given to lz tune, after --")
    given = parser.parse_args()
    import torch

    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if given.record is not None:
        record(given.record, device)
        return 0
    if given.serve is not None:
        serve(given.serve, device)
        return 0
    began = time.monotonic()
    data: dict[str, Any] = json.loads(given.json.read_text()) if given.folder and given.json.exists() else {"runs": {}}
    data |= {
        "machine": machine(), "device": device, "commit": commit(), "command": shlex.join(sys.argv),
        "model": QWEN3 if device == "cuda" else SMALL,
    }  # fmt: skip
    stages = given.stages.split(",")
    with contextlib.ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tuning-time-")))
        folder.mkdir(parents=True, exist_ok=True)
        traffic = folder / "traffic.json"
        if not traffic.exists():
            again = [sys.executable, __file__, "--record", str(traffic), "--device", device]
            subprocess.run(again, check=True, env={**os.environ, "LAYERZERO_JIT": "off", "LAYERZERO_PERFDB": "off"})
            data["recorded_s"] = round(time.monotonic() - began, 1)
        for stage, (name, goal), limit in zip(STAGES, GOALS_S.items(), given.limits, strict=False):
            if stage not in stages:
                continue
            ready = [] if name == "empty cache" else ["--no-compile"]
            found = tuned(traffic, folder, name, device, limit, [*ready, *given.options])
            if device == "cuda":
                found |= {"goal_s": goal, "met": not found["interrupted"] and found["seconds"] <= goal}
            data["runs"][name] = found | {"compiled": compiled(folder / "jit")}
            print(f"{name}: {json.dumps(found, ensure_ascii=False)}", flush=True)
            write_json(given.json, data)
        if "warm" in stages and data["runs"]:
            most = max(data["runs"], key=lambda name: data["runs"][name]["calls"])
            data["warm start"] = warm_start(traffic, folder, device, database(folder, most))
            print(f"warm start: {json.dumps(data['warm start'], ensure_ascii=False)}", flush=True)
        data["seconds"] = round(time.monotonic() - began, 1)
        data["figures"] = figures(data)
        write_json(given.json, data)
    return 0


def figures(data: dict[str, Any]) -> dict[str, dict[str, float]]:
    """What has a goal: the seconds of each tuning run that came to its end, and of unpacking, with its compiles."""
    whole = {name: run for name, run in data["runs"].items() if "goal_s" in run and not run["interrupted"]}
    found = {
        f"lz tune, {name}, seconds": {"value": run["seconds"], "at_most": run["goal_s"]} for name, run in whole.items()
    }
    warm = data.get("warm start", {})
    if "goal_s" in warm:
        found["unpacking a warm start, seconds"] = {"value": warm["unpack"]["seconds"], "at_most": warm["goal_s"]}
        found[f"compiles in {REQUESTS} requests"] = {"value": warm["serve"].get("compiles", 1), "at_most": 0}
    return found


def compiled(folder: Path) -> dict[str, float]:
    """Seconds that compiling took so far, by kernel and what it was compiled for."""
    from layerzero.jit.index import Index

    return {f"{item.kernel_id} {' '.join(item.values[2:])}": item.seconds for item in Index(folder).entries()}


if __name__ == "__main__":
    raise SystemExit(main())
