"""Models of diffusers, as they come and with `lz.patch`: time of one step, in turns, weights random.

    python benchmarks/diffusion.py --machine h200
    python benchmarks/diffusion.py --quick          small models, for a CPU

Contestants of a round: the model as it is ("stock"), patched ("patched"), and patched with its gated blocks, too
("gated"). They are the same object: what is not being timed is patched and unpatched between.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from timing import RESULTS, commit, machine, write_json

import layerzero as lz

WAYS: dict[str, dict[str, Any] | None] = {"stock": None, "patched": {}, "gated": {"feed_forward": True}}


def sdxl(small: bool) -> tuple[Any, dict[str, Any]]:
    """The UNet of SDXL for an image of 1024 × 1024, with guidance (two latents)."""
    from diffusers import UNet2DConditionModel

    wide = (32, 64) if small else (320, 640, 1280)
    count = len(wide)
    model = UNet2DConditionModel(
        sample_size=16 if small else 128, block_out_channels=wide, layers_per_block=1 if small else 2,
        down_block_types=("DownBlock2D", *("CrossAttnDownBlock2D",) * (count - 1)),
        up_block_types=(*("CrossAttnUpBlock2D",) * (count - 1), "UpBlock2D"),
        transformer_layers_per_block=(1, 2) if small else (1, 2, 10),
        attention_head_dim=(4, 8) if small else (5, 10, 20),
        cross_attention_dim=64 if small else 2048, use_linear_projection=True, addition_embed_type="text_time",
        addition_time_embed_dim=8 if small else 256, norm_num_groups=8 if small else 32,
        projection_class_embeddings_input_dim=(6 * 8 + 32) if small else (6 * 256 + 1280),
    )  # fmt: skip
    side, width, pooled = (16, 64, 32) if small else (128, 2048, 1280)
    return model, {
        "sample": torch.randn(2, 4, side, side),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": torch.randn(2, 77, width),
        "added_cond_kwargs": {"text_embeds": torch.randn(2, pooled), "time_ids": torch.ones(2, 6)},
    }


def flux(small: bool) -> tuple[Any, dict[str, Any]]:
    """Flux at 1024 × 1024, its widths, 2 of 19 double and 4 of 38 single blocks."""
    from diffusers import FluxTransformer2DModel

    heads, dim, side, text = (2, 16, 8, 16) if small else (24, 128, 64, 512)
    model = FluxTransformer2DModel(
        in_channels=64, num_layers=1 if small else 2, num_single_layers=2 if small else 4, attention_head_dim=dim,
        num_attention_heads=heads, joint_attention_dim=32 if small else 4096,
        pooled_projection_dim=32 if small else 768,
        axes_dims_rope=(4, 4, 8) if small else (16, 56, 56), guidance_embeds=False,
    )  # fmt: skip
    ids = torch.zeros(side * side, 3)
    ids[:, 1], ids[:, 2] = torch.arange(side * side) // side, torch.arange(side * side) % side
    return model, {
        "hidden_states": torch.randn(1, side * side, 64),
        "encoder_hidden_states": torch.randn(1, text, 32 if small else 4096),
        "pooled_projections": torch.randn(1, 32 if small else 768),
        "timestep": torch.tensor([0.5]),
        "img_ids": ids,
        "txt_ids": torch.zeros(text, 3),
    }


def dit(small: bool) -> tuple[Any, dict[str, Any]]:
    """DiT-XL/2 at 256 × 256, batch 8."""
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2 if small else 16, attention_head_dim=16 if small else 72, num_layers=2 if small else 28,
        in_channels=4, out_channels=8, sample_size=32, patch_size=2, attention_bias=True, norm_type="ada_norm_zero",
        activation_fn="gelu-approximate", num_embeds_ada_norm=1000, norm_elementwise_affine=False,
    )  # fmt: skip
    batch = 1 if small else 8
    return model, {
        "hidden_states": torch.randn(batch, 4, 32, 32),
        "timestep": torch.full((batch,), 500),
        "class_labels": torch.ones(batch, dtype=torch.long),
    }


MODELS: dict[str, Callable[[bool], tuple[Any, dict[str, Any]]]] = {"sdxl": sdxl, "flux": flux, "dit": dit}


def placed(item: Any, device: str, dtype: torch.dtype) -> Any:
    """Inputs on the device, numbers with a point in the dtype of the model."""
    if isinstance(item, dict):
        return {key: placed(value, device, dtype) for key, value in item.items()}
    return item.to(device, dtype if item.is_floating_point() else item.dtype)


def measure(name: str, device: str, dtype: torch.dtype, small: bool, rounds: int) -> dict[str, Any]:
    """Medians of one step in ms, and how far a patched step is from the stock one."""
    torch.manual_seed(0)
    with torch.device(device):
        model, inputs = MODELS[name](small)
    model = model.to(device, dtype).eval()
    inputs = placed(inputs, device, dtype)
    samples: dict[str, list[float]] = {way: [] for way in WAYS}
    results = {}
    # The first round compiles and selects; it is not counted.
    for turn in range(rounds + 1):
        for way, options in WAYS.items() if turn % 2 else reversed(WAYS.items()):
            if options is not None:
                lz.patch(model, **options)
            results[way] = model(**inputs, return_dict=False)[0]
            _wait(device)
            start = time.perf_counter()
            model(**inputs, return_dict=False)
            _wait(device)
            if turn:
                samples[way].append((time.perf_counter() - start) * 1e3)
            lz.unpatch(model)
    lz.patch(model)
    with lz.record() as calls:
        model(**inputs, return_dict=False)
    kernels = {item.context.op: _chosen(item.context) for item in calls.traffic.calls}
    median = {way: round(statistics.median(found), 3) for way, found in samples.items()}
    scale = results["stock"].float().abs().max().item()
    return {
        "model": name,
        "rounds": rounds,
        "median_ms": median,
        "patched_over_stock": round(median["patched"] / median["stock"], 4),
        "gated_over_stock": round(median["gated"] / median["stock"], 4),
        "largest_difference": {
            way: (results[way].float() - results["stock"].float()).abs().max().item() / scale for way in WAYS
        },
        "kernels": kernels,
    }


def _chosen(context: Any) -> str | None:
    from layerzero.dispatch.run import current_world
    from layerzero.selection.engine import select

    return select(context, current_world()).chosen


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> int:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="here", help="name of the folder under benchmarks/results")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="small models, few rounds")
    parser.add_argument("--models", default=",".join(MODELS), help="which of them")
    given = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = given.quick or device == "cpu"
    if device == "cuda":
        # The first round may wait for compilers, but not for those that take minutes.
        lz.configure(jit="block", deny=["flashinfer.*", "inductor.*"])
    rows = []
    with torch.no_grad():
        for name in given.models.split(","):
            row = measure(name, device, torch.bfloat16 if device == "cuda" else torch.float32, small, 5 if small else 9)
            rows.append(row)
            times = "  ".join(f"{way} {ms:.2f} ms" for way, ms in row["median_ms"].items())
            print(f"{name:6} {times}  patched/stock {row['patched_over_stock']:.3f}  {row['kernels']}", flush=True)
    path = given.json or RESULTS / given.machine / "diffusion.json"
    command = " ".join(["python benchmarks/diffusion.py", *(argv if argv is not None else sys.argv[1:])])
    write_json(path, {"machine": machine(), "commit": commit(), "command": command, "device": device, "cases": rows})
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
