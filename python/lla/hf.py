"""Local Linear Attention in Hugging Face transformers (>= 5): attn_implementation="lla".

    lla.hf.register(ridge=0.5)
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="lla")    # or from_config

The ridge of a layer is, in this order: the layer's `lla_ridge` (see `set_ridge`) or learned ridge
(`add_learned_ridge`), `config.lla_ridge`, the value given to `register`. Infinity reproduces softmax attention to
rounding, so that a pretrained model can be switched over and its ridge lowered from there.

Masks: causal, sliding or chunked windows, packed sequences and padding are computed exactly; anything else (a mask by
head, dropout, soft-capped logits, attention sinks) is refused with a ValueError.

Generation: under torch.no_grad() the keys are a cache in the operator's sense, with the lengths and the left padding of
each sequence on the device: nothing is copied and no mask is looked at on the host, whether the cache is a DynamicCache
or a StaticCache. A padding mask that hides tokens between others has no such form: on the CPU it is refused, on CUDA the
sequence's rows are NaN. Continuous batching (`generate_batch`): inside `with lla.hf.continuous_batching(model):`."""
import contextlib
import math
from typing import Optional, Union

import torch
from torch import Tensor, nn

from ._masks import Packing, pack_mask, pack_padding
from .debug import check_mode
from .functional import REAL, lla_attention, lla_attention_varlen
from .kvcache import lla_attention_with_kvcache

try:
    import transformers
    from transformers import AttentionInterface, masking_utils
    from transformers.masking_utils import AttentionMaskInterface
except ImportError as error:
    raise ImportError("lla.hf needs transformers >= 5 (pip install 'transformers>=5')") from error

# What other attention functions take and this one has no meaning for.
_REFUSED = ("softcap", "s_aux", "sinks", "position_bias", "head_mask")
# The name for continuous batching, which transformers offers to implementations with "flash" in their names alone.
_CONTINUOUS = "lla_flash"
_CONTINUOUS_SINCE = (5, 22)  # earlier ones keep their pages, and name implementations, in other ways


def _is_causal(mask_function, window):
    """Whether a mask function is transformers' causal one, with or without the window, and nothing joined to it."""
    if mask_function is masking_utils.causal_mask_function:
        return not window
    whole = masking_utils.sliding_window_causal_mask_function(window or 1)
    if getattr(mask_function, "__code__", None) is not whole.__code__:
        return False
    parts, expected = (f.__closure__[0].cell_contents for f in (mask_function, whole))
    return (len(parts) == 2 and parts[1] is masking_utils.causal_mask_function
            and parts[0].__code__ is expected[0].__code__ and parts[0].__closure__[0].cell_contents == window)


def _cache_lengths(attention_mask, batch_size, kv_length, end, kv_offset, device):
    """The mask of keys in a cache: int32 (2, B, 1, 1), first visible key and length of each sequence; transformers takes
    masks of four dimensions as they are. end: the positions there are, the new ones included, a number or a tensor; the
    keys are those from kv_offset on."""
    length = torch.as_tensor(end, device=device).expand(batch_size) - kv_offset
    if attention_mask is None:
        return torch.stack((torch.zeros_like(length), length)).to(torch.int32)[..., None, None]
    keep = attention_mask.to(device, torch.bool)
    count = keep.sum(1)
    first = torch.where(count > 0, keep.to(torch.uint8).argmax(1), keep.shape[1])
    last = keep.shape[1] - keep.flip(1).to(torch.uint8).argmax(1)
    broken = (count > 0) & (count != last - first)
    if broken.device.type == "cpu" and bool(broken.any()):
        raise ValueError("attention_mask hides tokens between others, which generation with 'lla' cannot follow: pad on "
                         "one side")
    length = torch.where(broken, -1, length)
    return torch.stack(((first - kv_offset).clamp(min=0), length)).to(torch.int32)[..., None, None]


def _real_keys_end_with_queries(q_length, kv_length, q_offset, kv_offset):
    """False where a preallocated cache has room behind the queries' own keys."""
    return kv_offset + kv_length == int(q_offset) + q_length


def lla_mask(*, batch_size, kv_length, mask_function, attention_mask=None, q_length=None, q_offset=0, kv_offset=0,
             cache_position=None, local_size=None, **rest) -> Optional[Tensor]:
    """The mask function: first keys and lengths where no gradient is wanted (`_cache_lengths`); otherwise None for a plain
    mask, (B, Lk) for padding; and (B, 1, Lq, Lk) for whatever else."""
    sizes = dict(q_length=q_length, q_offset=q_offset)
    if cache_position is not None:  # how transformers before 5.3 tells the queries' positions
        sizes = dict(cache_position=cache_position)
        q_length, q_offset = cache_position.shape[0], cache_position[0]
    if not torch.is_grad_enabled() and _is_causal(mask_function, local_size):
        device = rest.get("device")
        if device is None:
            device = attention_mask.device if attention_mask is not None else torch.get_default_device()
        return _cache_lengths(attention_mask, batch_size, kv_length, q_offset + q_length, kv_offset, device)
    plain = mask_function in (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
    if plain and _real_keys_end_with_queries(q_length, kv_length, q_offset, kv_offset):
        if attention_mask is None or attention_mask.shape[1] == kv_length:
            return None if attention_mask is None or bool(attention_mask.all()) else attention_mask.to(torch.bool)
    rest.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    mask = masking_utils.sdpa_mask(batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset,
                                   mask_function=mask_function, attention_mask=attention_mask, local_size=local_size,
                                   **sizes, **rest)
    mask._lla_packing = pack_mask(mask, local_size or 0)  # once for all layers
    return mask


def _packing_of(mask, length_q, causal, window) -> Packing:
    kept = getattr(mask, "_lla_packing", None)
    if kept is not None:
        return kept
    if mask.dtype != torch.bool:  # an additive mask a caller made: 0 shows a key, a very negative number hides it
        seen = mask == 0
        if mask.is_floating_point() and not bool((seen | (mask < -1e4)).all()):
            raise ValueError("attention_mask adds values to the logits; only masks that show or hide keys are "
                             "supported")
        mask = seen if mask.is_floating_point() else mask.to(torch.bool)
    if mask.dim() == 2:
        if window:
            raise ValueError("attention_mask (batch, keys) beside a sliding window: give the whole mask")
        return pack_padding(mask, length_q, causal)
    return pack_mask(mask, window)


def _attend_packed(q, k, v, ridge, packing, **options):
    """q, k, v (B, L, H, D); queries that no sequence holds (padding) get zero."""
    batch, length_q = q.shape[:2]
    o = lla_attention_varlen(
        q.flatten(0, 1)[packing.query_rows], k.flatten(0, 1)[packing.key_rows], v.flatten(0, 1)[packing.key_rows],
        ridge, packing.cu_seqlens_q, packing.cu_seqlens_k, packing.max_seqlen_q, packing.max_seqlen_k,
        causal=packing.causal, window_size=(packing.window_left, -1), **options)
    padded = o.new_zeros(batch * length_q, *o.shape[1:]).index_copy(0, packing.query_rows, o)
    return padded.unflatten(0, (batch, length_q))


def _attend_paged(module, q, k, v, ridge, cache, kwargs, window, **options):
    """Continuous batching: q (total, H, D) of several requests, and a paged cache that is transformers' own. Its pages are
    followed where they lie; layers that keep their last keys in a ring are read by transformers first."""
    if not hasattr(cache, "layer_to_allocator"):
        raise ValueError(f"continuous batching with 'lla' does not know the paged cache of transformers "
                         f"{transformers.__version__}; 5.22 works")
    allocator = cache.layer_to_allocator[module.layer_idx]
    cu_q, longest_q = kwargs["cu_seq_lens_q"].to(torch.int32), kwargs["max_length_q"]
    read = kwargs["read_index"][allocator.index] if kwargs.get("block_table") is None else None
    if not allocator.supports_block_table or (read is not None and read.numel() == 0):
        k, v = cache.update(k.transpose(0, 1)[None], v.transpose(0, 1)[None], module.layer_idx, kwargs)
        k, v = (t[0].transpose(0, 1) for t in (k, v))
        return lla_attention_varlen(q, k, v, ridge, cu_q, kwargs["cu_seq_lens_k"], longest_q, kwargs["max_length_k"],
                                    window_size=window, **options)
    cu_k = kwargs["cu_seq_lens_k"][allocator.layer_type].to(torch.int32)
    longest_k = kwargs["max_length_k"][allocator.layer_type]
    k_pages, v_pages = allocator.get_cache_for_block_table(module.layer_idx)
    page_size = k_pages.shape[1]
    if read is None:
        table = kwargs["block_table"][allocator.index][:cu_q.shape[0] - 1]
        lengths = cu_k[1:] - cu_k[:-1]
        return lla_attention_with_kvcache(q, k_pages, v_pages, ridge, k, v, cache_seqlens=lengths - (cu_q[1:] - cu_q[:-1]),
                                          page_table=table, cu_seqlens_q=cu_q, max_seqlen_q=longest_q,
                                          window_size=window, **options)
    # Where each key lies is given token by token; every page_size-th names a page.
    write = kwargs["write_index"][allocator.index]
    for pages, new in ((k_pages, k), (v_pages, v)):
        pages.view(-1, *pages.shape[2:]).index_copy_(0, write, new)
    first = cu_k[:-1, None].long() + torch.arange(0, max(longest_k, 1), page_size, device=q.device)
    table = (read[first.clamp(max=read.shape[0] - 1)] // page_size).to(torch.int32)
    return lla_attention_with_kvcache(q, k_pages, v_pages, ridge, cache_seqlens=cu_k[1:] - cu_k[:-1], page_table=table,
                                      cu_seqlens_q=cu_q, max_seqlen_q=longest_q, max_seqlen_k=longest_k,
                                      window_size=window, **options)


def _ridge_of(module: nn.Module, default) -> Union[float, Tensor]:
    ridge = getattr(module, "lla_ridge", None)
    if ridge is not None:
        return ridge
    logits = getattr(module, "lla_ridge_logit", None)
    if logits is not None:
        floor = module.lla_ridge_min
        ridge = floor + (1 - floor) * torch.sigmoid(logits.float())
    else:
        ridge = getattr(getattr(module, "config", None), "lla_ridge", None)
    return default if ridge is None else ridge


def _make_attention(default_ridge, options):
    def lla_attention_forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, is_causal=None,
                              sliding_window=None, **kwargs):
        for name in _REFUSED:
            if kwargs.get(name) is not None:
                raise ValueError(f"attn_implementation 'lla' does not support {name}")
        if dropout:
            raise ValueError(f"attn_implementation 'lla' has no dropout: set attention_dropout to 0 (it is {dropout})")
        if kwargs.get("output_attentions"):
            raise ValueError("attn_implementation 'lla' makes no attention matrix: output_attentions is not supported")
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        ridge = _ridge_of(module, default_ridge)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        window = (sliding_window - 1, -1) if sliding_window else (-1, -1)
        cache = kwargs.get("cache")
        if cache is not None:
            o = _attend_paged(module, q[0], k[0], v[0], ridge, cache, kwargs, window, scale=scaling, **options)[None]
        elif (attention_mask is not None and attention_mask.dtype == torch.int32
              and attention_mask.shape == (2, q.shape[0], 1, 1)):  # of `_cache_lengths`, not a caller's own
            first_key, lengths = attention_mask.flatten(1).unbind(0)
            o = lla_attention_with_kvcache(q, k, v, ridge, cache_seqlens=lengths, first_key=first_key,
                                           max_seqlen_k=k.shape[1], scale=scaling, causal=causal, window_size=window,
                                           **options)
        elif attention_mask is None:
            o = lla_attention(q, k, v, ridge, scale=scaling, causal=causal, window_size=window, **options)
        else:
            packing = _packing_of(attention_mask, q.shape[1], causal, sliding_window or 0)
            o = _attend_packed(q, k, v, ridge, packing, scale=scaling, **options)
        return o, None

    return lla_attention_forward


def register(ridge: float = 1.0, *, name: str = "lla", tol: Optional[float] = None, max_iterations: Optional[int] = None,
             solver: str = "auto", check: Optional[str] = None, precision: Optional[str] = None) -> str:
    """Registers attention and mask functions under `name`; returns the name. Call it again, or with another name, to
    change the default ridge or the solver's options (those of `lla.lla_attention`)."""
    if isinstance(ridge, bool) or not isinstance(ridge, REAL):
        raise TypeError(f"ridge must be a number, not {type(ridge).__name__}; see set_ridge for tensors")
    if not ridge >= 0:
        raise ValueError(f"ridge must be at least 0, not {ridge}")
    major = int(transformers.__version__.split(".")[0])
    if major < 5:
        raise ImportError(f"lla.hf needs transformers >= 5; this is {transformers.__version__}")
    options = dict(tol=tol, max_iterations=max_iterations, solver=solver, check=check_mode(check), precision=precision)
    for key in (name, _CONTINUOUS):
        AttentionInterface.register(key, _make_attention(ridge, options))
        AttentionMaskInterface.register(key, lla_mask)
    return name


@contextlib.contextmanager
def continuous_batching(model: nn.Module):
    """Lets `model.generate_batch` run a model with attn_implementation "lla": the pages of transformers' cache are followed
    where they lie. The ridge and options are those of the last `register`. Needs transformers 5.22 or newer."""
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < _CONTINUOUS_SINCE:
        raise NotImplementedError(f"continuous batching with 'lla' needs transformers 5.22 or newer, whose paged cache it "
                                  f"reads; this is {transformers.__version__}")
    before = model.config._attn_implementation
    # By the attribute: set_attn_implementation would look for a flash-attention package of this name.
    model.config._attn_implementation = _CONTINUOUS
    try:
        yield model
    finally:
        model.config._attn_implementation = before


def attention_modules(model: nn.Module):
    """The model's attention layers: the modules that carry what an attention function reads."""
    found = [m for m in model.modules() if hasattr(m, "is_causal") and hasattr(m, "config")
             and not isinstance(m, transformers.PreTrainedModel)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no attention layers of transformers' attention interface")
    return found


def _heads(module):
    return module.config.num_attention_heads


def set_ridge(model: nn.Module, ridge: Union[float, Tensor, None]):
    """Fixes the ridge of every attention layer: a number, a (heads,) tensor, or None to return to the learned ridge or the
    default."""
    for module in attention_modules(model):
        module.lla_ridge = ridge


def add_learned_ridge(model: nn.Module, initial: float = 0.5, ridge_min: float = 1e-3):
    """Gives every attention layer a learned ridge per head, ridge_min + (1 - ridge_min) sigmoid(parameter), starting at
    `initial`; returns the new parameters (for the optimizer). They are part of the state_dict as lla_ridge_logit, and in
    force until `set_ridge` fixes another ridge."""
    if not ridge_min < initial < 1:
        raise ValueError(f"initial must be between ridge_min {ridge_min} and 1, not {initial}")
    share = (initial - ridge_min) / (1 - ridge_min)
    parameters = []
    for module in attention_modules(model):
        device = next(module.parameters()).device
        logit = torch.full((_heads(module),), math.log(share / (1 - share)), device=device)
        module.lla_ridge_logit = nn.Parameter(logit)
        module.lla_ridge_min, module.lla_ridge = ridge_min, None
        parameters.append(module.lla_ridge_logit)
    return parameters
