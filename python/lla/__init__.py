"""lla: Local Linear Attention for PyTorch, on CPUs and GPUs.

    o = lla.lla_attention(q, k, v, ridge=0.1)              # (B, L, H, D), causal
    layer = lla.LocalLinearAttention(512, num_heads=8)     # a drop-in attention layer with learned ridge
    lla.hf.register()                                      # attn_implementation="lla" in transformers

`lla.reference` (plain torch), `lla.debug`, `lla.hf` and `lla.distributed` are submodules, loaded on first use."""
import importlib

_unavailable = None
try:
    from .functional import (STATUS_NAMES, AttentionInfo, BackwardInfo, lla_attention, lla_attention_bhld,
                             lla_attention_varlen, parallax_attention)
    from .kvcache import cache_append, lla_attention_with_kvcache, parallax_attention_with_kvcache
    from .machine import explain, implementations, machine, version
    from .module import KVCache, LocalLinearAttention
except ImportError as error:  # no torch, or no operator library: what needs neither still works
    _unavailable = error

__all__ = ["STATUS_NAMES", "AttentionInfo", "BackwardInfo", "KVCache", "LocalLinearAttention", "cache_append", "explain",
           "implementations", "lla_attention", "lla_attention_bhld", "lla_attention_varlen",
           "lla_attention_with_kvcache", "machine", "parallax_attention", "parallax_attention_with_kvcache", "version"]
_SUBMODULES = ("debug", "distributed", "hf", "reference")


def __getattr__(name):
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if _unavailable is not None and name in __all__:
        raise ImportError(f"lla.{name} is not available: {_unavailable}") from _unavailable
    raise AttributeError(f"module 'lla' has no attribute {name!r}")
