"""One line turns LayerZero on in a pipeline of diffusers: the same image, by kernels that are chosen for each call.

The pipeline is tiny and its weights are random, so the image is noise; with `from_pretrained` it is the same line.
Run it: python examples/diffusers_pipeline.py [image.png]   (needs diffusers, transformers and pillow)
"""

from __future__ import annotations

import sys

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

import layerzero as lz

SIZE, STEPS = 32, 2


def pipeline() -> FluxPipeline:
    """Flux with random weights; the prompt comes as vectors, so no text encoder is needed."""
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2, latent_channels=1,
        up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=8, shift_factor=0.06, scaling_factor=1.5,
    )  # fmt: skip
    pipe = FluxPipeline(FlowMatchEulerDiscreteScheduler(), vae, None, None, None, None, transformer)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to("cuda" if torch.cuda.is_available() else "cpu")


def image(pipe: FluxPipeline) -> torch.Tensor:
    """An image [H, W, 3] from 0 to 1, each time from the same noise."""
    generator = torch.Generator().manual_seed(1)
    prompt, pooled = torch.randn(1, 5, 32, generator=generator), torch.randn(1, 32, generator=generator)
    found = pipe(
        prompt_embeds=prompt.to(pipe.device), pooled_prompt_embeds=pooled.to(pipe.device), height=SIZE, width=SIZE,
        num_inference_steps=STEPS, generator=generator, output_type="np",
    )  # fmt: skip
    return torch.from_numpy(found.images[0])


def main() -> None:
    """Before, patched, and after."""
    pipe = pipeline()
    before = image(pipe)

    lz.patch(pipe)  # attention, norms and rotary embedding of every model in it
    print(lz.patched(pipe))
    with lz.record() as calls:
        patched = image(pipe)
    for op in sorted({item.context.op for item in calls.traffic.calls}):
        print(f"{op}: {sum(item.count for item in calls.traffic.calls if item.context.op == op)} calls")
    print(f"largest difference of a pixel: {(patched - before).abs().max().item():.1e}")
    torch.testing.assert_close(patched, before, rtol=1e-3, atol=1e-3)

    lz.unpatch(pipe)  # the very same objects as before
    assert torch.equal(image(pipe), before)
    if len(sys.argv) > 1:
        pipe.image_processor.numpy_to_pil(patched[None].numpy())[0].save(sys.argv[1])
        print("image:", sys.argv[1])


if __name__ == "__main__":
    main()
