"""`lz plan`: the cheapest way through a layer of a model on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from layerzero_cli.output import Answer, working
from layerzero_cli.root import cli
from layerzero_cli.verbs import verb


@verb(cli, "plan")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens of a sequence.")
@click.option("--device", default=None, help="Where to plan; default: the first accelerator, else the CPU.")
@click.option("--measure", is_flag=True, help="Time kernels here instead of estimating what was never measured.")
def plan(config: Path, batch: int, tokens: int, device: str | None, measure: bool) -> Answer:
    """Plan a decoder layer of the model in CONFIG (config.json or a model folder).

    \b
    lz plan path/to/model --batch 4 --tokens 512 --measure

    Norm, projections, rope, attention, add and norm, MLP, planned together: fused ops, packed projections and
    layouts are weighed by time. Shows the path, what each op alone would cost, and what was rejected.
    """
    from layerzero_tune.blocks.plan import plan_block

    block, tensors = _layer(config, batch, tokens, device)
    with working(f"planning {block.name}"):
        report = plan_block(block, tensors, measure=measure).explain()
    return Answer(report.to_json(), report.blocks())


def _layer(config: Path, batch: int, tokens: int, device: str | None) -> tuple[Any, dict[str, Any]]:
    import torch

    from layerzero.errors import ConfigurationError
    from layerzero.recording.traffic import read_mapping
    from layerzero_tune.blocks.block import decoder_layer
    from layerzero_tune.model_calls import ModelShape

    shape = ModelShape.of(read_mapping(config))
    if shape.norm != "rms_norm" or not shape.gated or shape.experts or shape.rotary_dim != shape.head_dim:
        raise ConfigurationError(
            "only layers of RMSNorm, rotary attention and a gated MLP are planned as a whole", code="CONFIG_INVALID",
            value=f"{shape.norm}, {'gated' if shape.gated else 'plain'} MLP, {shape.experts} experts",
            limit="Llama-like layers", hint="describe the layer's steps yourself: see docs/blocks.md",
        )  # fmt: skip
    where = device or (torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None) or "cpu"
    dtype, draw = getattr(torch, shape.dtype), torch.Generator(where).manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(size, generator=draw, device=where) * scale).to(dtype)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return normal(rows, columns, scale=columns**-0.5)

    hidden, width, inner = shape.hidden, shape.head_dim, shape.inner
    angles = torch.arange(tokens, device=where)[:, None] * torch.linspace(1, 0.01, width // 2, device=where)
    tensors = {
        "x": normal(batch, tokens, hidden),
        "cos": angles.cos().to(dtype),
        "sin": angles.sin().to(dtype),
        **{name: 1 + normal(hidden, scale=0.1) for name in ("ln1", "ln2")},
        "wq": weight(shape.heads * width, hidden),
        **{name: weight(shape.kv_heads * width, hidden) for name in ("wk", "wv")},
        "wo": weight(hidden, shape.heads * width),
        **{name: weight(inner, hidden) for name in ("w_gate", "w_up")},
        "w_down": weight(hidden, inner),
    }
    window = None if shape.window is None else (shape.window, 0)
    return decoder_layer(shape.heads, shape.kv_heads, activation=shape.activation, window=window), tensors
