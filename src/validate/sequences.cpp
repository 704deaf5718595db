#include "validate/sequences.hpp"

#include <algorithm>

namespace lla::core {
namespace {

bool on_host(const Tensor& t) { return t.device_type == LLA_CPU && t.data != nullptr; }

}  // namespace

Status check_cu_seqlens(const NamedTensor& arg, int64_t total, const char* longest_name, int64_t longest) {
  const auto* cu = static_cast<const int32_t*>(arg.tensor.data);
  const int64_t n = arg.tensor.size[0];
  if (cu[0] != 0) return invalid(cat(arg.name, ": must start at 0, but starts at ", cu[0]));
  for (int64_t i = 1; i < n; ++i) {
    if (cu[i] < cu[i - 1])
      return invalid(cat(arg.name, ": must not decrease, but entry ", i, " is ", cu[i], " after ", cu[i - 1]));
    if (cu[i] - cu[i - 1] > longest) {
      return invalid(cat(arg.name, ": sequence ", i - 1, " has length ", cu[i] - cu[i - 1], ", more than ",
                         longest_name, " = ", longest));
    }
  }
  if (cu[n - 1] > total)
    return invalid(cat(arg.name, ": ends at ", cu[n - 1], ", beyond the ", total, " rows of the packed tensor"));
  return {};
}

Status read_cu_seqlens(const NamedTensor& cu, const Bound& bound, const Tensor& q, Pointers pointers, int64_t total,
                       int64_t& longest) {
  LLA_RETURN_IF_ERROR(check_int_vector(cu, q, pointers, "(sequences + 1)"));
  if (cu.tensor.size[0] < 1)
    return invalid(cat(cu.name, ": shape is ", shape_text(cu.tensor), ", must be (sequences + 1)"));
  if (bound.value < 0) return invalid(cat(bound.name, ": ", bound.value, " must be at least 0 (0: unknown)"));
  // Plans depend on this bound and never on the contents of cu_seqlens, which may be in device memory.
  longest = bound.value > 0 ? std::min(bound.value, total) : total;
  return {};
}

Status read_packing(const PackingArgs& a, Pointers pointers, Problem& p) {
  const NamedTensor cu_q{"cu_seqlens_q", a.cu_seqlens_q}, cu_k{"cu_seqlens_k", a.cu_seqlens_k};
  for (const NamedTensor& cu : {cu_q, cu_k}) {
    if (!present(cu.tensor))
      return invalid(cat(cu.name, ": is absent, but the other cu_seqlens is given; give both or none"));
  }
  LLA_RETURN_IF_ERROR(read_cu_seqlens(cu_q, {"max_seqlen_q", a.max_seqlen_q}, a.q, pointers, p.total_q, p.seqlen_q));
  LLA_RETURN_IF_ERROR(read_cu_seqlens(cu_k, {"max_seqlen_k", a.max_seqlen_k}, a.q, pointers, p.total_k, p.seqlen_k));
  if (a.cu_seqlens_q.size[0] != a.cu_seqlens_k.size[0]) {
    return invalid(
        cat("cu_seqlens_k: has ", a.cu_seqlens_k.size[0], " entries, but cu_seqlens_q has ", a.cu_seqlens_q.size[0]));
  }
  p.batch = a.cu_seqlens_q.size[0] - 1;
  if (on_host(a.cu_seqlens_q) && on_host(a.cu_seqlens_k)) {
    LLA_RETURN_IF_ERROR(check_cu_seqlens(cu_q, p.total_q, "max_seqlen_q", p.seqlen_q));
    LLA_RETURN_IF_ERROR(check_cu_seqlens(cu_k, p.total_k, "max_seqlen_k", p.seqlen_k));
  }
  return {};
}

Status read_pages(const NamedTensor& keys, const NamedTensor& table, int64_t batch, Pointers pointers, KeyCache& cache,
                  int64_t& capacity) {
  const Tensor &k = keys.tensor, &t = table.tensor;
  cache.pages = k.size[0];
  if (!present(t)) {
    if (k.size[0] != batch) {
      return invalid(cat(keys.name, ": is a contiguous cache for ", k.size[0], " sequences, but there are ", batch,
                         " (pages need a page_table)"));
    }
    capacity = k.size[1];
    return {};
  }
  LLA_RETURN_IF_ERROR(check_view(table, pointers));
  LLA_RETURN_IF_ERROR(check_dtype(table, {DType::i32}, "i32"));
  LLA_RETURN_IF_ERROR(same_device(table, k));
  if (t.ndim != 2 || t.size[0] != batch)
    return invalid(cat(table.name, ": shape is ", shape_text(t), ", must be (B, max_pages) with B = ", batch));
  if (t.size[1] > 1 && t.stride[1] != 1)
    return invalid(cat(table.name, ": a sequence's pages must be dense, but their stride is ", t.stride[1]));
  if (k.size[1] < 1) return invalid(cat(keys.name, ": page size is ", k.size[1], ", must be at least 1"));
  if (__builtin_mul_overflow(t.size[1], k.size[1], &capacity))
    return invalid(cat(table.name, ": ", t.size[1], " pages of ", k.size[1], " keys are more than can be counted"));
  cache.page_size = k.size[1];
  cache.table = static_cast<const int32_t*>(t.data);
  cache.table_stride = t.stride[0];
  return {};
}

Status read_cache(const lla_forward_args& a, Pointers pointers, ForwardCall& call) {
  Problem& p = call.problem;
  if (present(a.cu_seqlens_k))
    return invalid("cu_seqlens_k: is given beside seqlens_k, but the keys of a cache are not packed");
  LLA_RETURN_IF_ERROR(check_int_vector({"seqlens_k", a.seqlens_k}, a.q, pointers, "(B)"));
  p.cache = true;
  p.batch = a.seqlens_k.size[0];
  if (p.packed) {
    const NamedTensor cu{"cu_seqlens_q", a.cu_seqlens_q};
    LLA_RETURN_IF_ERROR(read_cu_seqlens(cu, {"max_seqlen_q", a.max_seqlen_q}, a.q, pointers, p.total_q, p.seqlen_q));
    if (a.cu_seqlens_q.size[0] - 1 != p.batch) {
      return invalid(cat("cu_seqlens_q: has ", a.cu_seqlens_q.size[0], " entries, but seqlens_k has ", p.batch,
                         "; there must be one more"));
    }
    if (on_host(a.cu_seqlens_q)) LLA_RETURN_IF_ERROR(check_cu_seqlens(cu, p.total_q, "max_seqlen_q", p.seqlen_q));
  } else {
    if (a.max_seqlen_q != 0) {
      return invalid(
          cat("max_seqlen_q: ", a.max_seqlen_q, " is given without cu_seqlens_q; it belongs to packed sequences only"));
    }
    if (a.q.size[0] != p.batch)
      return invalid(cat("seqlens_k: has ", p.batch, " entries, but q has batch ", a.q.size[0]));
    p.seqlen_q = a.q.size[1];
  }
  int64_t capacity = 0;
  LLA_RETURN_IF_ERROR(read_pages({"k", a.k}, {"page_table", a.page_table}, p.batch, pointers, call.cache, capacity));
  for (const Bound& bound : {Bound{"max_seqlen_k", a.max_seqlen_k}, Bound{"max_total_k", a.max_total_k}}) {
    if (bound.value < 0) return invalid(cat(bound.name, ": ", bound.value, " must be at least 0 (0: unknown)"));
  }
  p.page_size = call.cache.page_size;
  p.seqlen_k = call.cache.max_length = a.max_seqlen_k > 0 ? std::min(a.max_seqlen_k, capacity) : capacity;
  call.cache.lengths = static_cast<const int32_t*>(a.seqlens_k.data);
  if (present(a.first_key)) {
    LLA_RETURN_IF_ERROR(check_int_vector({"first_key", a.first_key}, a.q, pointers, "(B)"));
    LLA_RETURN_IF_ERROR(check_shape({"first_key", a.first_key}, {p.batch}, "(B)"));
    call.cache.first_key = static_cast<const int32_t*>(a.first_key.data);
  }
  return {};
}

Status check_cache(const NamedTensor& t, const Tensor& keys, int64_t channels, const char* channel_name, bool paged) {
  return check_shape(t, {keys.size[0], keys.size[1], keys.size[2], channels},
                     paged ? "(pages, page_size, Hkv, " : "(B, capacity, Hkv, ", channel_name, ")");
}

Status check_pages(const KeyCache& cache, int64_t b, int64_t begin, int64_t end) {
  if (cache.table == nullptr || begin >= end) return {};
  for (int64_t entry = begin / cache.page_size; entry <= (end - 1) / cache.page_size; ++entry) {
    const int64_t page = cache.table[b * cache.table_stride + entry];
    if (!cache.has_page(page)) {
      return invalid(cat("page_table: sequence ", b, " has page ", page, " in use (its entry ", entry,
                         "), but there are pages 0 to ", cache.pages - 1));
    }
  }
  return {};
}

Status check_cache_contents(const ForwardCall& call) {
  const Problem& p = call.problem;
  const KeyCache& cache = call.cache;
  if (p.device != Device::cpu || !cache || (p.packed && call.cu_seqlens_q == nullptr)) return {};
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t length = cache.lengths[b];
    if (length < 0 || length > cache.max_length) {
      return invalid(cat("seqlens_k: sequence ", b, " has length ", length, ", must be 0 to ", cache.max_length,
                         " (max_seqlen_k, or what the cache holds)"));
    }
    if (cache.first_key != nullptr && cache.first_key[b] < 0)
      return invalid(cat("first_key: sequence ", b, " begins at ", cache.first_key[b], ", must be at least 0"));
    if (p.page_size > 0 && cache.table == nullptr) continue;  // asked about before there is a table
    const KeyRange keys = visible_keys(p.mask, sequence(call, b));
    LLA_RETURN_IF_ERROR(check_pages(cache, b, keys.begin, keys.end));
  }
  return {};
}

}  // namespace lla::core
