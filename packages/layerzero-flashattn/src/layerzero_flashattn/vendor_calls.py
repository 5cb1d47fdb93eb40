"""Which functions of the vendor libraries the adapters call; `tools/signatures.py` records their signatures."""

CALLS = (
    "flash_attn.cute.interface._flash_attn_fwd",
    "flash_attn.cute.interface.flash_attn_func",
    "flash_attn.cute.interface.flash_attn_varlen_func",
    "quack.cross_entropy.cross_entropy",
    "quack.cross_entropy.cross_entropy_fwd",
    "quack.rmsnorm.layernorm_bwd",
    "quack.rmsnorm.layernorm_fwd",
    "quack.rmsnorm.rmsnorm",
    "quack.rmsnorm.rmsnorm_fwd",
    "quack.rotary.apply_rotary",
)

# These two libraries are built from source; where they cannot be built, signatures are read off their sources.
SOURCE_CALLS = (
    "flash_attn.flash_attn_interface.flash_attn_func",
    "flash_attn.flash_attn_interface.flash_attn_varlen_func",
    "flash_attn.flash_attn_interface.flash_attn_with_kvcache",
    "flash_attn_interface.flash_attn_func",
    "flash_attn_interface.flash_attn_varlen_func",
    "flash_attn_interface.flash_attn_with_kvcache",
)
