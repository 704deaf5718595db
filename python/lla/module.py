"""An attention layer with Local Linear Attention inside."""
from typing import Optional, Tuple

import torch
from torch import Tensor, nn

from .debug import check_mode
from .functional import lla_attention, lla_attention_varlen
from .kvcache import lla_attention_with_kvcache


class KVCache:
    """Keys and values of one layer for generation: preallocated, every sequence filled from the left to a length of its
    own. `seqlens` (int32, (batch,), where the keys are) holds the lengths; `first_key`, None or alike, hides left padding.
    Tokens are taken back by lowering `seqlens` (drafts that were not accepted, a sequence that ended).

    page_size: None keeps (batch, capacity, heads, dim) for each of k and v. A number keeps pages of so many positions,
    (pages, page_size, heads, dim), and a page_table (batch, n): by default each sequence has pages of its own; with
    `pages` fewer (or more), the table starts at -1 and is the caller's to fill, who may let sequences share pages."""

    def __init__(self, batch: int, capacity: int, num_kv_heads: int, head_dim: int, *, value_dim: Optional[int] = None,
                 page_size: Optional[int] = None, pages: Optional[int] = None, device=None, dtype=None):
        value_dim = head_dim if value_dim is None else value_dim
        if pages is not None and page_size is None:
            raise ValueError("pages is given without page_size")
        if page_size is None:
            slots = (batch, capacity)
        else:
            if page_size < 1:
                raise ValueError(f"page_size must be at least 1, not {page_size}")
            width = -(-capacity // page_size)
            slots = (batch * width if pages is None else pages, page_size)
            self.page_table = torch.arange(batch * width, dtype=torch.int32, device=device).view(batch, width)
            if pages is not None:
                self.page_table.fill_(-1)
        self.k = torch.zeros(*slots, num_kv_heads, head_dim, device=device, dtype=dtype)
        self.v = torch.zeros(*slots, num_kv_heads, value_dim, device=device, dtype=dtype)
        self.seqlens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.capacity = capacity
        self._longest = 0
        self._replayed = False  # by a CUDA graph, which fills the cache without the host's knowing

    page_table: Optional[Tensor] = None
    first_key: Optional[Tensor] = None

    @property
    def length(self) -> int:
        """What the host knows of the lengths: none is above it."""
        return self.capacity if self._replayed else self._longest

    def grown(self, tokens) -> int:
        """The bound after so many new tokens; raises where they do not fit. Of a step that a CUDA graph captures it is the
        capacity, from then on: replays fill the cache, and what does not fit is NaN with status "invalid"."""
        self._notice_capture()
        if self._replayed:
            return self.capacity
        if self._longest + tokens > self.capacity and len(self.seqlens) > 0 and not torch.compiler.is_compiling():
            self._longest = int(self.seqlens.max())  # some may be shorter by now: waiting for that beats refusing
        if self._longest + tokens > self.capacity:
            raise ValueError(f"cache_seqlens: {self._longest} positions and {tokens} new ones do not fit a cache of "
                             f"{self.capacity}")
        return self._longest + tokens

    def grown_at_most(self, tokens) -> int:
        """The bound where only some sequences may get so many."""
        self._notice_capture()
        return min(self.length + tokens, self.capacity)

    def _notice_capture(self):
        if self.seqlens.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing():
            self._replayed = True

    def advance(self, tokens, longest: int):
        """Counts new tokens, a number or one per sequence, of which none has more than `longest`."""
        self.seqlens += tokens
        self._longest = min(self._longest + longest, self.capacity)

    def reset(self, sequences: Optional[Tensor] = None):
        """Empties the cache, or the sequences of an index or mask."""
        if sequences is None:
            self.seqlens.zero_()
            self._longest = 0
        else:
            self.seqlens[sequences] = 0


class RotaryEmbedding(nn.Module):
    """Rotary position embedding on (..., L, H, D), halves rotated against each other (as in Llama)."""

    def __init__(self, head_dim: int, theta: float = 10000.0):
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, not {head_dim}")
        self.head_dim, self.theta = head_dim, theta

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """positions: (L,) or (B, L)."""
        # Made anew, for a buffer would be rounded by module.to(bfloat16), and would hold anything after to_empty().
        exponents = torch.arange(0, self.head_dim, 2, device=x.device, dtype=torch.float32) / self.head_dim
        angles = positions[..., None, None].to(torch.float32) * self.theta ** -exponents  # (..., L, 1, D/2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class LocalLinearAttention(nn.Module):
    """Self-attention with a learned ridge: lambda = ridge_min + (1 - ridge_min) sigmoid(W x + b), or softplus for
    sigmoid (ridge_form).

    embed_dim, num_heads; num_kv_heads < num_heads shares keys and values between heads; head_dim defaults to
    embed_dim / num_heads.
    ridge: what lambda is learned for, beside the token: "head" (one per head), "dimension" (one per head and dimension)
    or "shared" (one per dimension of a head, the same for all heads: the paper's d_lambda = d_h).
    ridge_bias: whether W has a bias; the paper writes none.
    ridge_min: floor of lambda; 0 is the paper's form, the default keeps training away from singular fits.
    ridge_form: "sigmoid" is the paper's, lambda is at most 1; "softplus" has no upper bound, so that a head may come
    close to softmax attention, which language models want of some (docs/python.md).
    rope: rotary position embedding. qk_norm: RMS normalisation of queries and keys per head.
    The other options are those of `lla_attention`.

    forward(x (B, L, embed_dim)) -> (B, L, embed_dim). With a `KVCache` (see `make_cache`) x continues the cached
    sequence and the cache is extended in place, under torch.no_grad(). With cu_seqlens, x is (total, embed_dim); with a
    cache too, each sequence gets as many tokens as its part of x has."""

    def __init__(self, embed_dim: int, num_heads: int, num_kv_heads: Optional[int] = None,
                 head_dim: Optional[int] = None, *, ridge: str = "head", ridge_bias: bool = True,
                 ridge_min: float = 1e-3, ridge_form: str = "sigmoid", rope: bool = False, rope_theta: float = 10000.0,
                 qk_norm: bool = False, bias: bool = False, causal: bool = True, window_size: Tuple[int, int] = (-1, -1),
                 scale: Optional[float] = None, tol: Optional[float] = None,
                 max_iterations: Optional[int] = None, solver: str = "auto", check: Optional[str] = None,
                 precision: Optional[str] = None, device=None, dtype=None):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = dict(embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        for name, size in sizes.items():
            if size is None and name == "head_dim":
                continue
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"{name} must be an integer, not {type(size).__name__}")
            if size < 1:
                raise ValueError(f"{name} must be at least 1, not {size}")
        if head_dim is None:
            if embed_dim % num_heads:
                raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}; give head_dim")
            head_dim = embed_dim // num_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}")
        # Heads and dimensions that lambda is told apart by.
        shapes = {"head": (num_heads, 1), "dimension": (num_heads, head_dim), "shared": (1, head_dim)}
        if ridge not in shapes:
            raise ValueError(f'ridge must be "head", "dimension" or "shared", not {ridge!r}')
        if not 0 <= ridge_min < 1:
            raise ValueError(f"ridge_min must be in [0, 1), not {ridge_min}")
        if ridge_form not in ("sigmoid", "softplus"):
            raise ValueError(f'ridge_form must be "sigmoid" or "softplus", not {ridge_form!r}')
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.ridge_form = ridge_form
        self.ridge, self.ridge_min, self._ridge_shape = ridge, ridge_min, shapes[ridge]
        self.options = dict(scale=scale, causal=causal, window_size=window_size, tol=tol,
                            max_iterations=max_iterations, solver=solver, check=check_mode(check), precision=precision)
        factory = dict(device=device, dtype=dtype)
        self.q_proj = nn.Linear(embed_dim, num_heads * head_dim, bias=bias, **factory)
        self.k_proj = nn.Linear(embed_dim, num_kv_heads * head_dim, bias=bias, **factory)
        self.v_proj = nn.Linear(embed_dim, num_kv_heads * head_dim, bias=bias, **factory)
        self.o_proj = nn.Linear(num_heads * head_dim, embed_dim, bias=bias, **factory)
        self.ridge_proj = nn.Linear(embed_dim, self._ridge_shape[0] * self._ridge_shape[1], bias=ridge_bias, **factory)
        self.q_norm = nn.RMSNorm(head_dim, **factory) if qk_norm else None
        self.k_norm = nn.RMSNorm(head_dim, **factory) if qk_norm else None
        self.rope = RotaryEmbedding(head_dim, rope_theta) if rope else None

    def extra_repr(self) -> str:
        return (f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
                f"ridge={self.ridge!r}, ridge_min={self.ridge_min}, ridge_form={self.ridge_form!r}")

    def make_cache(self, batch: int, capacity: int, *, page_size: Optional[int] = None, pages: Optional[int] = None,
                   device=None, dtype=None) -> KVCache:
        """An empty cache for `batch` sequences of up to `capacity` tokens, by default where the weights are; paged where
        a page_size is given (see `KVCache`)."""
        weight = self.k_proj.weight
        return KVCache(batch, capacity, self.num_kv_heads, self.head_dim, page_size=page_size, pages=pages,
                       device=device or weight.device, dtype=dtype or weight.dtype)

    def compute_ridge(self, x: Tensor) -> Tensor:
        """lambda of each token, (..., L, H) or (..., L, H, D), in float32 (float64 for float64 layers)."""
        logits = self.ridge_proj(x)
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        logits = logits.to(wide).unflatten(-1, self._ridge_shape)
        positive = torch.sigmoid(logits) if self.ridge_form == "sigmoid" else nn.functional.softplus(logits)
        ridge = self.ridge_min + (1 - self.ridge_min) * positive
        if self.ridge == "head":
            return ridge.squeeze(-1)
        return ridge.expand(*ridge.shape[:-2], self.num_heads, self.head_dim)

    def _project(self, x, positions):
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            q, k = self.rope(q, positions), self.rope(k, positions)
        return q, k, v

    def forward(self, x: Tensor, *, cache: Optional[KVCache] = None, positions: Optional[Tensor] = None,
                cu_seqlens: Optional[Tensor] = None, max_seqlen: Optional[int] = None) -> Tensor:
        """positions (L,) or (B, L) are used by rope only; by default they count from the cached length, or from the
        start of each packed sequence. cu_seqlens (int32) and max_seqlen: x is packed, (total, embed_dim)."""
        packed = cu_seqlens is not None
        if packed and max_seqlen is None:
            raise ValueError("cu_seqlens needs max_seqlen")
        if x.dim() != (2 if packed else 3):
            raise ValueError(f"x has {x.dim()} dimensions, not "
                             + ("(total, embed_dim)" if packed else "(batch, length, embed_dim)"))
        if self.rope is not None and positions is None:
            positions = self._default_positions(x, cache, cu_seqlens)
        q, k, v = self._project(x, positions)
        ridge = self.compute_ridge(x)
        if cache is not None:
            o = self._attend_cache(q, k, v, ridge, cache, cu_seqlens, max_seqlen)
        elif packed:
            o = lla_attention_varlen(q, k, v, ridge, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **self.options)
        else:
            o = lla_attention(q, k, v, ridge, **self.options)
        return self.o_proj(o.flatten(-2))

    def _attend_cache(self, q, k, v, ridge, cache, cu_seqlens, max_seqlen):
        longest = q.shape[1] if cu_seqlens is None else max_seqlen
        bound = cache.grown(longest) if cu_seqlens is None else cache.grown_at_most(longest)
        o = lla_attention_with_kvcache(q, cache.k, cache.v, ridge, k, v, cache_seqlens=cache.seqlens,
                                       page_table=cache.page_table, first_key=cache.first_key, cu_seqlens_q=cu_seqlens,
                                       max_seqlen_q=max_seqlen, max_seqlen_k=bound, **self.options)
        cache.advance(longest if cu_seqlens is None else cu_seqlens[1:] - cu_seqlens[:-1], longest)
        return o

    @staticmethod
    def _default_positions(x, cache, cu_seqlens):
        """Of each token in its own sequence; left padding does not count."""
        start = None if cache is None else cache.seqlens
        if start is not None and cache.first_key is not None:
            start = start - cache.first_key
        if cu_seqlens is None:
            steps = torch.arange(x.shape[1], device=x.device)
            return steps if start is None else start[:, None] + steps
        token = torch.arange(x.shape[0], device=x.device, dtype=cu_seqlens.dtype)
        sequence = torch.searchsorted(cu_seqlens, token, right=True) - 1
        position = token - cu_seqlens[sequence]
        return position if start is None else position + start[sequence.clamp(max=len(start) - 1)]
