/* lla: Local Linear Attention. The C interface.
 *
 * Everything the library can do is reachable from here; include/lla/lla.hpp is a thin C++ layer over it.
 *
 * Conventions
 *  - No function throws, exits or prints. Each returns an lla_status; lla_last_error() says in a sentence what was
 *    wrong with the last call of this thread. A call that fails its checks writes nothing.
 *  - Tensors are described by lla_tensor views; sizes and strides count elements. A zeroed lla_tensor means "absent".
 *  - Layouts: q (B, Lq, Hq, D), k (B, Lk, Hkv, D), v (B, Lk, Hkv, Dv), o (B, Lq, Hq, Dv), Hq a multiple of Hkv.
 *    Packed sequences drop the batch dimension, q (total_q, Hq, D) and so on, and give cu_seqlens_q and cu_seqlens_k.
 *  - What a call writes (outputs and workspace) must not share memory with anything else it is given; views that lie
 *    between each other's elements, such as dq, dk and dv in one buffer, are fine.
 *  - Structs begin with their size so that they can grow: new fields come last, a struct that ends before them means
 *    their defaults, one that is longer than this library knows is refused. Fill a struct with its _init function, then
 *    set the fields you need.
 *  - Calls may come from any thread with 128 KiB of stack, before main and while the process ends. The caller's
 *    rounding mode, flushing of subnormals and traps are set aside in a call and do not change results.
 *  - Nothing is allocated in a call: ask for the workspace size, pass a workspace. (CPU threads are kept in a pool; the
 *    fp64 reference, last in the list, is the one implementation that allocates as it goes. lla_cache_append allocates
 *    on the host, to see that no place is written twice.) */
#ifndef LLA_LLA_H
#define LLA_LLA_H

#include <stddef.h>
#include <stdint.h>

#define LLA_VERSION_MAJOR 0
#define LLA_VERSION_MINOR 1
#define LLA_VERSION_PATCH 0

#if defined(LLA_BUILDING_LIBRARY)
#define LLA_API __attribute__((visibility("default")))
#else
#define LLA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum lla_status {
  LLA_OK = 0,
  LLA_INVALID_ARGUMENT = 1,    /* the arguments contradict each other or the contract */
  LLA_UNSUPPORTED = 2,         /* a legal problem that no implementation takes; the message lists each one's reason */
  LLA_WORKSPACE_TOO_SMALL = 3, /* ask lla_forward_query or lla_backward_query */
  LLA_OUT_OF_MEMORY = 4,
  LLA_CUDA_ERROR = 5,
  LLA_INTERNAL = 6
} lla_status;

typedef enum lla_dtype {
  LLA_DTYPE_NONE = 0, /* an absent tensor */
  LLA_F32 = 1,
  LLA_F64 = 2,
  LLA_BF16 = 3,
  LLA_F16 = 4,
  LLA_I32 = 5,
  LLA_I64 = 6
} lla_dtype;

typedef enum lla_device_type { LLA_CPU = 0, LLA_CUDA = 1 } lla_device_type;

typedef enum lla_solver {
  LLA_SOLVER_AUTO =
      0,             /* the planner's cost model chooses; a row conjugate gradients cannot finish is solved directly */
  LLA_SOLVER_CG = 1, /* matrix-free conjugate gradients */
  LLA_SOLVER_DIRECT = 2 /* form the matrix, factor it */
} lla_solver;

typedef enum lla_weights {
  LLA_WEIGHTS_AUTO = 0,
  LLA_WEIGHTS_RECOMPUTE = 1, /* softmax weights are computed again in every pass over the keys */
  LLA_WEIGHTS_CACHED = 2     /* kept per block of queries, in the workspace */
} lla_weights;

/* What f32 tensors may be rounded to on their way into products. f64, bf16 and f16 do not depend on it. */
typedef enum lla_precision {
  LLA_PRECISION_FULL = 0,
  LLA_PRECISION_TF32 = 1 /* 11 significant bits, as torch's TF32: allows the tensor cores; sums and outputs stay f32 */
} lla_precision;

/* What a row of the info output says. */
typedef enum lla_row_status {
  LLA_ROW_OK = 0,
  LLA_ROW_MAX_ITERATIONS = 1, /* the tolerance was not met; the last iterate is used */
  LLA_ROW_BREAKDOWN = 2, /* rounding is all that is left: vanishing or non-positive curvature (or pivot), a residual
                            that falls no further, a result its type cannot hold; the last good iterate is used */
  LLA_ROW_NAN = 3,       /* a negative or NaN ridge, or a non-finite q, k, v or gradient in the row */
  LLA_ROW_PRECISION = 4, /* it sees a key or value so far (2^-28) below its head's largest that digits are lost */
  LLA_ROW_INVALID = 5    /* its sequence's length, pages or cu_seqlens_q, read on the device, are out of bounds: the
                            row is NaN, and nothing of the sequence was read */
} lla_row_status;

#define LLA_MAX_DIMS 4

typedef struct lla_tensor {
  void* data;
  int32_t dtype;        /* lla_dtype; LLA_DTYPE_NONE marks an absent tensor */
  int32_t device_type;  /* lla_device_type */
  int32_t device_index; /* CUDA ordinal; 0 for the CPU */
  int32_t ndim;         /* 0 to LLA_MAX_DIMS */
  int64_t size[LLA_MAX_DIMS];
  int64_t stride[LLA_MAX_DIMS];
} lla_tensor;

typedef struct lla_options {
  size_t struct_size;
  double scale;         /* of the logits; NaN (the default) means 1/sqrt(D) */
  double tolerance;     /* a row's solve stops at |r| <= tolerance |q - mean key|; NaN (the default) means 1e-3 for
                           16-bit q, 1e-4 for f32, 1e-9 for f64. In the backward pass the right-hand side is
                           another; rows go on where so much would show in their results (docs/math.md) */
  int64_t window_left;  /* keys visible to the left of the diagonal, -1 (default) unbounded; any size is fine */
  int64_t window_right; /* ... and to the right */
  int64_t cached_weights_limit; /* bytes cached weights may take in the workspace; default 1 GiB */
  const char* implementation;   /* NULL: the first of lla_implementation_name's list that takes the problem */
  int32_t causal;               /* default 1; the mask is aligned bottom-right when Lq != Lk */
  int32_t max_iterations;       /* of conjugate gradients; 0 (default) means max(64, 8 D) */
  int32_t solver;               /* lla_solver */
  int32_t weights;              /* lla_weights */
  int32_t precision;            /* lla_precision */
  int32_t batch_invariant;      /* 1: a sequence's bits do not depend on what else is in the batch (equal bounds given);
                                   default 0 */
} lla_options;

/* What a call needs. Set struct_size; the query fills in as much as fits. The saved vector's sections begin at these
 * offsets, in elements, for R = B Hq Lq rows r = (b Hq + h) Lq + i (packed: R = Hq total_q, r = h total_q + i):
 *   max[R]      integer-valued bound of the row's logits in log2 units (scale log2(e) q.k)
 *   omega[R]    sum of exp2(logit - max); 0 for a row without keys
 *   mean_k[R][D], mean_v[R][Dv], x[R][D] */
typedef struct lla_forward_sizes {
  size_t struct_size;
  size_t workspace_bytes;
  int64_t saved_elements; /* 0 with a cache */
  int64_t saved_max, saved_omega, saved_mean_k, saved_mean_v, saved_x;
} lla_forward_sizes;

typedef struct lla_backward_sizes {
  size_t struct_size;
  size_t workspace_bytes;
} lla_backward_sizes;

/* Memory on demand, instead of a query before the call: where `allocate` is set, a call checks its arguments and plans,
 * then asks once. The function is given the answer of the query and the call's own copy of the arguments, in which it
 * sets workspace and workspace_bytes; the forward's may also set the data of outputs that were described without, and
 * saved. What it returns, if not LLA_OK, the call returns. */
struct lla_forward_args;
struct lla_backward_args;
typedef lla_status (*lla_forward_allocate)(void* context, const lla_forward_sizes* sizes,
                                           struct lla_forward_args* args);
typedef lla_status (*lla_backward_allocate)(void* context, const lla_backward_sizes* sizes,
                                            struct lla_backward_args* args);

/* Give exactly one of ridge and x.
 *  - ridge: (), (Hq), (B, Lq, Hq) or (B, Lq, Hq, D), packed (total_q, Hq) or (total_q, Hq, D); f32, or f64 where q is
 *    f64.
 *  - x: (B, Lq, Hq, D) or (total_q, Hq, D), in q's dtype or f32: attention with this x instead of a solve (Parallax).
 *
 * k and v have q's dtype; o has it too, or is f32. */
typedef struct lla_forward_args {
  size_t struct_size;
  const lla_options* options; /* null: the defaults */
  lla_tensor q, k, v, ridge, x;
  lla_tensor o;
  /* Packed sequences only: int32 (sequences + 1), starting at 0, non-decreasing; on the tensors' device.
   * The tensors may be longer than the last sequence: rows behind it belong to none. They are never read, and every
   * output (o, the gradients, saved and the information on rows) is zero there.
   * max_seqlen_* bound the lengths (on CUDA they size the launch; on the CPU 0 means "find out"). */
  lla_tensor cu_seqlens_q, cu_seqlens_k;
  int64_t max_seqlen_q, max_seqlen_k;
  /* Optional outputs. saved: one dense vector of saved_elements (lla_forward_query), f32 (f64 where q is f64), for
   * lla_backward.
   * iterations and row_status (int32), residual (f32; final relative residual, with what rounding may hide, so above
   * the tolerance where that is more than the arithmetic can give): dense (B, Hq, Lq), packed (Hq, total_q). Both are
   * -1 where a row was solved directly or had x given, the residual also where there is nothing to solve. */
  lla_tensor saved, iterations, residual, row_status;
  void* workspace; /* on the tensors' device, 256-byte aligned */
  size_t workspace_bytes;
  void* stream; /* cudaStream_t; ignored on the CPU */
  /* Generation: seqlens_k makes k and v a cache, contiguous (B, capacity, Hkv, D) or, with page_table, in pages
   * (pages, page_size, Hkv, D) of any size; any strides. Sequence b has seqlens_k[b] keys, those of the new tokens
   * included; its key j lies in page page_table[b][j / page_size] at j % page_size. Queries are dense or packed by
   * cu_seqlens_q alone, so that sequences with one row and with many share a call; their masks are aligned to the end
   * of their own sequence. Keys before first_key[b] are invisible (left padding); the mask still counts from the
   * length. What lies behind a length, and table entries no row sees, is never read. Inference only: saved is refused.
   * On CUDA all of these are read on the device. max_seqlen_k bounds the lengths (0: the capacity); max_total_k bounds
   * the keys of all sequences that do not decode (0: B max_seqlen_k) and sizes the workspace. A sequence that breaks a
   * bound, or names a page that is not there, gets NaN and LLA_ROW_INVALID and changes no other. On the CPU a call with
   * such a sequence is refused. */
  lla_tensor seqlens_k;  /* int32 (B) */
  lla_tensor page_table; /* int32 (B, max_pages), rows dense */
  lla_tensor first_key;  /* int32 (B) */
  int64_t max_total_k;
  lla_forward_allocate allocate; /* null: the workspace is there */
  void* allocate_context;
} lla_forward_args;

/* Gradients: any of dq, dk, dv, dridge (or dx) may be absent. dq, dk, dv, dx have q's dtype or f32; dridge is like
 * ridge. */
typedef struct lla_backward_args {
  size_t struct_size;
  const lla_options* options;
  lla_tensor q, k, v, ridge, x, saved;
  lla_tensor grad_o;
  lla_tensor dq, dk, dv, dridge, dx;
  lla_tensor cu_seqlens_q, cu_seqlens_k;
  int64_t max_seqlen_q, max_seqlen_k;
  lla_tensor iterations, residual, row_status; /* of the solve of the backward pass */
  void* workspace;
  size_t workspace_bytes;
  void* stream;
  lla_backward_allocate allocate;
  void* allocate_context;
} lla_backward_args;

/* Writes new keys and values into a cache, in place. k (B, Lnew, Hkv, D) and v (B, Lnew, Hkv, Dv), or packed
 * (total, Hkv, D) with cu_seqlens; the caches are those of lla_forward, in k's dtype. Give one of
 *   seqlens: int32 (B), lengths before the call: token t of sequence b becomes key seqlens[b] + t; or
 *   slots:   int64 (B, Lnew), packed (total): token i goes to slots[i] % page_size of page slots[i] / page_size (of
 *            a contiguous cache: of sequence slots[i] / capacity); -1 skips a token.
 * On CUDA a sequence (with slots: a token) that does not fit writes nothing, the others proceed; status, optional,
 * int32 (B), with slots like slots, says so: LLA_ROW_OK or LLA_ROW_INVALID. On the CPU such a call is refused and
 * writes nothing; so is one that would write a place twice, where on CUDA one of the two stays.
 * new_seqlens, optional beside seqlens: int32 (B), gets the lengths with the new tokens, which lla_forward takes as
 * seqlens_k; -1 of a sequence whose lengths do not fit, so that its rows become LLA_ROW_INVALID there. */
typedef struct lla_cache_append_args {
  size_t struct_size;
  lla_tensor k, v;
  lla_tensor k_cache, v_cache;
  lla_tensor seqlens, slots;
  lla_tensor page_table; /* with seqlens: int32 (B, max_pages); absent: the cache is contiguous */
  lla_tensor cu_seqlens; /* of the new tokens: int32 (B + 1); absent: k and v are not packed. With seqlens only */
  lla_tensor status;
  void* stream;
  lla_tensor new_seqlens;
} lla_cache_append_args;

/* The defaults, in structs of the size this header gives them. */
LLA_API void lla_options_init_size(lla_options* options, size_t struct_size);
LLA_API void lla_forward_args_init_size(lla_forward_args* args, size_t struct_size);
LLA_API void lla_backward_args_init_size(lla_backward_args* args, size_t struct_size);
LLA_API void lla_cache_append_args_init_size(lla_cache_append_args* args, size_t struct_size);
static inline void lla_options_init(lla_options* options) { lla_options_init_size(options, sizeof *options); }
static inline void lla_forward_args_init(lla_forward_args* args) { lla_forward_args_init_size(args, sizeof *args); }
static inline void lla_backward_args_init(lla_backward_args* args) { lla_backward_args_init_size(args, sizeof *args); }
static inline void lla_cache_append_args_init(lla_cache_append_args* args) {
  lla_cache_append_args_init_size(args, sizeof *args);
}

/* Queries: data pointers may be null, sizes, strides and options count. The forward's does not look at args->saved. */
LLA_API lla_status lla_forward_query(const lla_forward_args* args, lla_forward_sizes* sizes);
LLA_API lla_status lla_backward_query(const lla_backward_args* args, lla_backward_sizes* sizes);
/* The plan as text, always null-terminated; a plan longer than capacity is cut. */
LLA_API lla_status lla_forward_plan(const lla_forward_args* args, char* text, size_t capacity);
LLA_API lla_status lla_backward_plan(const lla_backward_args* args, char* text, size_t capacity);
/* One line per implementation of this build: "name: yes" or "name: no, <reason>". */
LLA_API lla_status lla_forward_explain(const lla_forward_args* args, char* text, size_t capacity);
LLA_API lla_status lla_backward_explain(const lla_backward_args* args, char* text, size_t capacity);

LLA_API lla_status lla_forward(const lla_forward_args* args);
LLA_API lla_status lla_backward(const lla_backward_args* args);
LLA_API lla_status lla_cache_append(const lla_cache_append_args* args);

LLA_API const char* lla_version(void);
LLA_API const char* lla_status_name(lla_status status);
/* The reason of the last failure in this thread, "" if none; valid until this thread's next call. */
LLA_API const char* lla_last_error(void);

/* Implementations of this build in order of preference; null beyond the end. */
LLA_API const char* lla_implementation_name(int32_t index);
LLA_API const char* lla_implementation_description(int32_t index);
/* What the library found on this machine: SIMD target, threads, CUDA device or the reason there is none. */
LLA_API const char* lla_machine_description(void);

/* Threads of the CPU backend, of which at most 1024 are used; 0 restores the default (LLA_NUM_THREADS, or the cores
 * this process may use). Results do not depend on it, and a workspace asked for under another number is large enough.
 * Where LLA_NUM_THREADS decides and is not a whole number, calls on the CPU are refused and name it.
 * A forked child may call the library whatever its parent's threads were doing; it starts threads of its own. */
LLA_API lla_status lla_set_num_threads(int32_t threads);
LLA_API int32_t lla_get_num_threads(void);

#ifdef __cplusplus
}
#endif
#endif
