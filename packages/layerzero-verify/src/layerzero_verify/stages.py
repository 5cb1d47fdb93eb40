"""The stages of a transformer layer, and the rules that name the faulty component from the stages that differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from layerzero_verify.report import StageDiff
from layerzero_verify.thresholds import BUG, FAR_WORSE

# stage -> (op that computes it, component it belongs to), in the order in which a layer computes them
_TABLE = {
    "embedding": ("embedding", "embedding"),
    "ln1_out": ("rms_norm", "norm"),
    "q_proj": ("linear", "QKV projection"),
    "k_proj": ("linear", "QKV projection"),
    "v_proj": ("linear", "QKV projection"),
    "q_rope": ("rope", "RoPE"),
    "k_rope": ("rope", "RoPE"),
    "scores": ("attention", "attention"),
    "attn_out": ("attention", "attention"),
    "proj_out": ("linear", "output projection"),
    "residual": ("add_rms_norm", "residual add"),
    "ln2_out": ("add_rms_norm", "norm"),
    "fc1_out": ("linear", "MLP"),
    "swiglu_out": ("silu_and_mul", "MLP"),
    "mlp_out": ("linear", "MLP"),
    "output": ("", "residual add"),
    "norm": ("rms_norm", "norm"),
    "head": ("linear", "output head"),
    "logits": ("linear", "output head"),
}
STAGES = tuple(_TABLE)
OPS = {stage: op for stage, (op, _) in _TABLE.items()}

# stage -> the stage whose op takes it in: a gradient that is wrong at a stage was made by the op that follows it
CONSUMERS = {
    "input": "ln1_out",
    "ln1_out": "q_proj",
    "q_proj": "q_rope",
    "k_proj": "q_rope",
    "v_proj": "attn_out",
    "q_rope": "attn_out",
    "k_rope": "attn_out",
    "attn_out": "proj_out",
    "proj_out": "ln2_out",
    "residual": "output",
    "ln2_out": "fc1_out",
    "fc1_out": "swiglu_out",
    "swiglu_out": "mlp_out",
    "mlp_out": "output",
}

_RULES = {
    "RoPE": "q or k diverge after the rotation and were right before it: RoPE, its convention or its tables",
    "attention": "q, k and v are right, the scores or the attention output are not: the attention kernel",
    "output projection": "the attention output is right, its projection is not: the output projection",
    "QKV projection": "the normed input is right, its projection is not: the query, key or value projection",
    "norm": "the norm's input is right, its output is not: the norm",
    "MLP": "the second norm is right, the MLP is not: the gated MLP",
    "residual add": "attention and MLP are right, their sum is not: the residual add",
    "embedding": "the first tensor of the model differs: the embedding",
    "output head": "the layers are right, the logits are not: the final norm or the output head",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Where a computation begins to differ, and which component that points to."""

    stage: str
    component: str
    rule: str


def bare(stage: str) -> str:
    """A stage's own name: "layer 1 q_rope" gives "q_rope"."""
    return stage.rpartition(" ")[2]


def localise(stages: Sequence[StageDiff]) -> Finding | None:
    """The first stage that differs decides; None when all agree. Stages come in the order they were computed."""
    wrong = next((item for item in stages if not item.ok), None)
    if wrong is None:
        return None
    component = _TABLE.get(bare(wrong.stage), ("", "unknown component"))[1]
    return Finding(wrong.stage, component, _RULES.get(component, ""))


def red_flags(stages: Sequence[StageDiff]) -> tuple[str, ...]:
    """What no rounding explains: a difference above 1.0, or one stage far worse than the others."""
    found = [
        f"{item.stage} differs by {item.max_abs:.3g}: above {BUG:g} is a bug, not rounding"
        for item in stages
        if not item.ok and not item.max_abs <= BUG
    ][:1]
    measured = [item.max_abs for item in stages if item.max_abs > 0.0]
    if len(measured) >= 4 and not all(item.ok for item in stages):
        worst = max(stages, key=lambda item: item.max_abs)
        if worst.max_abs > FAR_WORSE * median(measured):
            found.append(f"{worst.stage} is far worse than the other stages: look there")
    return tuple(found)
