"""Tiny pipelines with random weights: the real classes of diffusers and transformers, images of a few pixels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

__all__ = ["MODELS", "PIPELINES", "image_of"]


def _seeded(build: Any) -> Any:
    torch.manual_seed(0)
    built = build()
    return built.eval() if isinstance(built, torch.nn.Module) else built


def vae(**more: Any) -> Any:
    from diffusers import AutoencoderKL

    options: dict[str, Any] = {
        "block_out_channels": (16, 32),
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "latent_channels": 4,
        "norm_num_groups": 8,
        "sample_size": 32,
    }
    return _seeded(lambda: AutoencoderKL(**{**options, **more}))


def unet(**more: Any) -> Any:
    from diffusers import UNet2DConditionModel

    options: dict[str, Any] = {
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "sample_size": 16,
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 32,
        "attention_head_dim": 8,
        "norm_num_groups": 8,
    }
    return _seeded(lambda: UNet2DConditionModel(**{**options, **more}))


def sdxl_unet() -> Any:
    return unet(
        transformer_layers_per_block=(1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 32,
        attention_head_dim=(2, 4),
        cross_attention_dim=64,
    )


def flux() -> Any:
    from diffusers import FluxTransformer2DModel

    return _seeded(
        lambda: FluxTransformer2DModel(
            patch_size=1, in_channels=4, num_layers=1, num_single_layers=2, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
        )
    )  # fmt: skip


def sd3() -> Any:
    from diffusers import SD3Transformer2DModel

    return _seeded(
        lambda: SD3Transformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
            joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=64, out_channels=4,
            qk_norm="rms_norm", dual_attention_layers=(0,),
        )
    )  # fmt: skip


def dit() -> Any:
    from diffusers import DiTTransformer2DModel

    return _seeded(
        lambda: DiTTransformer2DModel(
            sample_size=16, num_layers=2, patch_size=4, attention_head_dim=8, num_attention_heads=2, in_channels=4,
            out_channels=8, attention_bias=True, activation_fn="gelu-approximate", num_embeds_ada_norm=1000,
            norm_type="ada_norm_zero", norm_elementwise_affine=False,
        )
    )  # fmt: skip


def pixart() -> Any:
    from diffusers import PixArtTransformer2DModel

    return _seeded(
        lambda: PixArtTransformer2DModel(
            sample_size=8, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=2, in_channels=4,
            out_channels=8, caption_channels=32, cross_attention_dim=16, use_additional_conditions=False,
        )
    )  # fmt: skip


def hunyuan() -> Any:
    from diffusers import HunyuanDiT2DModel

    return _seeded(
        lambda: HunyuanDiT2DModel(
            sample_size=16, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=3, in_channels=4,
            cross_attention_dim=32, cross_attention_dim_t5=32, pooled_projection_dim=16, hidden_size=24, text_len=4,
            text_len_t5=4, activation_fn="gelu-approximate",
        )
    )  # fmt: skip


def qwen() -> Any:
    from diffusers import QwenImageTransformer2DModel

    return _seeded(
        lambda: QwenImageTransformer2DModel(
            patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=3,
            joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
        )
    )  # fmt: skip


def _flux_inputs(dtype: torch.dtype) -> dict[str, Any]:
    ids = torch.zeros(16, 3)
    ids[:, 1], ids[:, 2] = torch.arange(16) // 4, torch.arange(16) % 4
    return {
        "hidden_states": torch.randn(2, 16, 4, dtype=dtype),
        "encoder_hidden_states": torch.randn(2, 5, 32, dtype=dtype),
        "pooled_projections": torch.randn(2, 32, dtype=dtype),
        "timestep": torch.tensor([1.0, 0.5], dtype=dtype),
        "img_ids": ids,
        "txt_ids": torch.zeros(5, 3),
    }


def _unet_inputs(dtype: torch.dtype) -> dict[str, Any]:
    keep = torch.ones(2, 7, dtype=torch.bool)
    keep[0, 4:] = False  # a padded prompt: cross attention gets a mask
    return {
        "sample": torch.randn(2, 4, 16, 16, dtype=dtype),
        "timestep": torch.tensor(3),
        "encoder_hidden_states": torch.randn(2, 7, 32, dtype=dtype),
        "encoder_attention_mask": keep,
    }


def _pixart_inputs(dtype: torch.dtype) -> dict[str, Any]:
    keep = torch.ones(2, 6)
    keep[1, 3:] = 0
    return {
        "hidden_states": torch.randn(2, 4, 8, 8, dtype=dtype),
        "timestep": torch.tensor([3, 7]),
        "encoder_hidden_states": torch.randn(2, 6, 32, dtype=dtype),
        "encoder_attention_mask": keep,
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def _hunyuan_inputs(dtype: torch.dtype) -> dict[str, Any]:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed

    return {
        "hidden_states": torch.randn(2, 4, 16, 16, dtype=dtype),
        "timestep": torch.tensor([3.0, 7.0], dtype=dtype),
        "encoder_hidden_states": torch.randn(2, 4, 32, dtype=dtype),
        "text_embedding_mask": torch.ones(2, 4),
        "encoder_hidden_states_t5": torch.randn(2, 4, 32, dtype=dtype),
        "text_embedding_mask_t5": torch.ones(2, 4),
        "image_meta_size": torch.randn(2, 6, dtype=dtype),
        "style": torch.zeros(2, dtype=torch.long),
        "image_rotary_emb": get_2d_rotary_pos_embed(
            8, ((0, 0), (8, 8)), (8, 8), output_type="pt"
        ),
    }  # fmt: skip


# name -> (build, inputs for a dtype, processors that must be patched)
MODELS: dict[str, tuple[Any, Any]] = {
    "unet": (unet, _unet_inputs),
    "dit": (
        dit,
        lambda dtype: {
            "hidden_states": torch.randn(2, 4, 16, 16, dtype=dtype),
            "timestep": torch.tensor([3, 7]),
            "class_labels": torch.tensor([1, 2]),
        },
    ),
    "pixart": (pixart, _pixart_inputs),
    "sd3": (
        sd3,
        lambda dtype: {
            "hidden_states": torch.randn(2, 4, 8, 8, dtype=dtype),
            "encoder_hidden_states": torch.randn(2, 5, 32, dtype=dtype),
            "pooled_projections": torch.randn(2, 64, dtype=dtype),
            "timestep": torch.tensor([3.0, 7.0]),
        },
    ),
    "flux": (flux, _flux_inputs),
    "hunyuan": (hunyuan, _hunyuan_inputs),
    "qwen": (
        qwen,
        lambda dtype: {
            "hidden_states": torch.randn(1, 16, 16, dtype=dtype),
            "encoder_hidden_states": torch.randn(1, 7, 16, dtype=dtype),
            "encoder_hidden_states_mask": torch.ones(1, 7, dtype=torch.long),
            "timestep": torch.tensor([0.5]),
            "img_shapes": [(1, 4, 4)],
        },
    ),
    "vae": (vae, lambda dtype: {"sample": torch.randn(1, 3, 32, 32, dtype=dtype)}),
}


def _clip(folder: Path) -> tuple[Any, Any]:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    words = [*letters, *(f"{c}</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    config = CLIPTextConfig(
        bos_token_id=52, eos_token_id=53, pad_token_id=53, hidden_size=32, intermediate_size=37, num_attention_heads=4,
        num_hidden_layers=2, vocab_size=len(words), max_position_embeddings=77,
    )  # fmt: skip
    return _seeded(lambda: CLIPTextModel(config)), CLIPTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=77
    )


def _scheduler() -> Any:
    from diffusers import DDIMScheduler

    return DDIMScheduler(steps_offset=1, clip_sample=False)


def stable_diffusion(folder: Path) -> tuple[Any, dict[str, Any]]:
    from diffusers import StableDiffusionPipeline

    text_encoder, tokenizer = _clip(folder)
    pipe = StableDiffusionPipeline(
        vae(), text_encoder, tokenizer, unet(), _scheduler(), None, None, requires_safety_checker=False
    )
    return pipe, {"prompt": "a small house by the sea", "height": 32, "width": 32, "guidance_scale": 5.0}


def sdxl(folder: Path) -> tuple[Any, dict[str, Any]]:
    from diffusers import StableDiffusionXLPipeline

    pipe = StableDiffusionXLPipeline(vae(), None, None, None, None, sdxl_unet(), _scheduler(), add_watermarker=False)
    embeds = {
        name: torch.randn(1, *shape)
        for name, shape in (
            ("prompt_embeds", (7, 64)), ("negative_prompt_embeds", (7, 64)),
            ("pooled_prompt_embeds", (32,)), ("negative_pooled_prompt_embeds", (32,)),
        )
    }  # fmt: skip
    return pipe, {**embeds, "height": 32, "width": 32, "guidance_scale": 5.0}


def flux_pipeline(folder: Path) -> tuple[Any, dict[str, Any]]:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    pipe = FluxPipeline(
        FlowMatchEulerDiscreteScheduler(), vae(latent_channels=1, shift_factor=0.0609, scaling_factor=1.5), None, None,
        None, None, flux(),
    )  # fmt: skip
    embeds = {"prompt_embeds": torch.randn(1, 5, 32), "pooled_prompt_embeds": torch.randn(1, 32)}
    return pipe, {**embeds, "height": 32, "width": 32, "guidance_scale": 3.5}


def pixart_pipeline(folder: Path) -> tuple[Any, dict[str, Any]]:
    from diffusers import PixArtAlphaPipeline

    pipe = PixArtAlphaPipeline(None, None, vae(), pixart(), _scheduler())
    embeds = {
        "prompt_embeds": torch.randn(1, 6, 32),
        "prompt_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]]),
        "negative_prompt": None,
        "negative_prompt_embeds": torch.randn(1, 6, 32),
        "negative_prompt_attention_mask": torch.tensor([[1, 0, 0, 0, 0, 0]]),
    }
    return pipe, {**embeds, "height": 16, "width": 16, "use_resolution_binning": False}


PIPELINES: dict[str, Any] = {
    "StableDiffusion": stable_diffusion,
    "SDXL": sdxl,
    "Flux": flux_pipeline,
    "PixArt": pixart_pipeline,
}


def image_of(pipe: Any, inputs: dict[str, Any], steps: int = 2) -> torch.Tensor:
    """The image [H, W, 3] of one run from the same noise, as numbers from 0 to 1."""
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(3)
    return torch.from_numpy(pipe(**inputs, num_inference_steps=steps, generator=generator, output_type="np").images[0])
