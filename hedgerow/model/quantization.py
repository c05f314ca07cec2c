"""How a checkpoint's matrices are stored, by its `quantization_config`. What has no code here is refused by name."""

from __future__ import annotations

from typing import Literal

from hedgerow.model.fields import Fields

Scheme = Literal["plain", "int4", "fp8"]


def scheme(f: Fields | None) -> Scheme:
    """Experts in compressed-tensors' words: "int4". Matrices in blocks of 128 x 128: "fp8". Raises ConfigError."""
    if f is None:
        return "plain"
    if f.values.get("quant_method") == "fp8":
        return fp8(f)
    f.must_be("quant_method", "compressed-tensors", None)
    f.must_be("format", "pack-quantized", None)
    f.must_be("kv_cache_scheme", None, None)
    groups = f.inner("config_groups")
    if groups is None or not groups.values:
        raise f.fail("config_groups", "a group must have weights")
    for name in groups.values:
        group = groups.inner(name)
        weights = group.inner("weights") if group else None
        if group is None or weights is None:
            raise f.fail("config_groups", "a group must have weights")
        for field, value in (("num_bits", 4), ("type", "int"), ("symmetric", True), ("group_size", 32)):
            weights.must_be(field, value, None)
        weights.must_be("strategy", "group", None)
        weights.must_be("actorder", None, None)
        group.must_be("input_activations", None, None)
    return "int4"


def fp8(f: Fields) -> Scheme:
    """DeepSeek's form: e4m3 with a float32 scale a block. Activations are not rounded here, whatever it says."""
    f.must_be("fmt", "e4m3", "e4m3")
    f.must_be("weight_block_size", [128, 128], None)
    return "fp8"
