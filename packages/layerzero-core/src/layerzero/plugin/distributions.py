"""The distributions an install hint may name: ours, the vendors our packages were written for, and installed ones.

A name that was typed, or that somebody else's descriptor holds, may belong to nobody or to anybody on a package index.
Such a one is named as what it is, never as a command to run.
"""

from __future__ import annotations

from layerzero.plugin.discovery import dist_version, normalized

_BACKENDS = (
    "accel",
    "cpu",
    "flashattn",
    "flashinfer",
    "hub",
    "liger",
    "linear-attention",
    "tokenizers",
    "triton",
    "xformers",
)
OURS = frozenset(
    f"layerzero-{name}" for name in ("core", "hostile", "kernels", "models", "tune", "verify", "vllm", *_BACKENDS)
)
# What the packages above and the core itself call, under the names their authors publish.
VENDORS = frozenset(
    {
        *("torch", "transformers", "diffusers", "cryptography", "prometheus-client", "opentelemetry-api"),
        *("flash-attn", "flash-attn-3", "flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl"),
        *("flashinfer-python", "sglang", "sgl-kernel", "xformers", "liger-kernel", "fla-core", "triton"),
        *("tokenizers", "tiktoken", "sentencepiece", "kernels", "model-signing"),
    }
)


def is_known(dist: str) -> bool:
    """Whether a hint may name this distribution as something to install."""
    return normalized(dist) in OURS or normalized(dist) in VENDORS or dist_version(dist) is not None


def install_hint(requirement: str, wanted_by: str) -> str:
    """The command that installs a requirement, or, for an unknown distribution, who asks for it and nothing to run."""
    from packaging.requirements import InvalidRequirement, Requirement  # most processes never give a hint

    try:
        name = Requirement(requirement).name
    except InvalidRequirement:  # a descriptor's own spelling; not a command then
        name = ""
    if name and is_known(name):
        return f"pip install {requirement}" if name == requirement else f"pip install '{requirement}'"
    return f"{wanted_by} asks for {requirement}, a distribution LayerZero does not know: look whose it is first"


def quoted(command: str, dist: str, wanted_by: str) -> str:
    """An install command somebody wrote: as it is for a known distribution, else as their words."""
    return command if is_known(dist) else f"{wanted_by} says: {command}; LayerZero does not know {dist}"
