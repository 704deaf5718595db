// Checks of lla_cache_append: whatever is wrong is said before anything is written.
#include <algorithm>
#include <vector>

#include "core/cache_append.hpp"
#include "validate/overlap.hpp"
#include "validate/sequences.hpp"

namespace lla::core {
namespace {

Operand operand(const Tensor& t) {
  Operand o{t.data, dtype_of(t), {0, 0, 0, 0}};
  std::copy(t.stride, t.stride + t.ndim, o.stride + (4 - t.ndim));
  return o;
}

// The four tensors that hold keys and values.
Status read_tensors(const lla_cache_append_args& a, CacheAppendCall& call) {
  const NamedTensor k{"k", a.k}, v{"v", a.v}, k_cache{"k_cache", a.k_cache}, v_cache{"v_cache", a.v_cache};
  const bool packed = a.k.ndim == 3;
  for (const NamedTensor& t : {k, v, k_cache, v_cache}) {
    if (!present(t.tensor)) return invalid(cat(t.name, ": is absent"));
    LLA_RETURN_IF_ERROR(check_view(t, Pointers::required));
    LLA_RETURN_IF_ERROR(check_dtype(t, {DType::f32, DType::f64, DType::bf16, DType::f16}, "f32, f64, bf16 or f16"));
    LLA_RETURN_IF_ERROR(check_dtype(t, {dtype_of(a.k)}, name(dtype_of(a.k)), " like k"));
    LLA_RETURN_IF_ERROR(same_device(t, a.k));
    const bool cache = &t.tensor == &a.k_cache || &t.tensor == &a.v_cache;
    if (t.tensor.ndim != (packed && !cache ? 3 : 4)) {
      return invalid(cat(t.name, ": shape is ", shape_text(t.tensor), ", must have ",
                         cache    ? "4 dimensions, (B, capacity, Hkv, D) or in pages (pages, page_size, Hkv, D)"
                         : packed ? "3 dimensions (total, Hkv, D) like k"
                                  : "4 dimensions (B, Lnew, Hkv, D), or 3 packed"));
    }
  }
  const int64_t* size = a.k.size + (a.k.ndim - 3);
  call.device = a.k.device_type == LLA_CPU ? Device::cpu : Device::cuda;
  call.device_index = a.k.device_index;
  call.width = static_cast<int32_t>(size_of(dtype_of(a.k)));
  call.batch = packed ? 1 : a.k.size[0];
  call.length = call.total = size[0];
  call.heads = size[1];
  call.dim = size[2];
  call.value_dim = a.v.size[a.v.ndim - 1];
  if (packed) {
    LLA_RETURN_IF_ERROR(check_shape(v, {size[0], size[1], call.value_dim}, "(total, Hkv, Dv)"));
  } else {
    LLA_RETURN_IF_ERROR(check_shape(v, {a.k.size[0], size[0], size[1], call.value_dim}, "(B, Lnew, Hkv, Dv)"));
  }
  const auto cache_shape = [&](const NamedTensor& t, int64_t channels) {
    return check_shape(t, {a.k_cache.size[0], a.k_cache.size[1], call.heads, channels},
                       "(B, capacity, Hkv, D) or (pages, page_size, Hkv, D)");
  };
  LLA_RETURN_IF_ERROR(cache_shape(k_cache, call.dim));
  LLA_RETURN_IF_ERROR(cache_shape(v_cache, call.value_dim));
  LLA_RETURN_IF_ERROR(check_writable(k_cache));
  LLA_RETURN_IF_ERROR(check_writable(v_cache));
  call.k = operand(a.k);
  call.v = operand(a.v);
  call.k_cache = operand(a.k_cache);
  call.v_cache = operand(a.v_cache);
  call.slots_per_page = a.k_cache.size[1];
  call.stream = a.stream;
  return {};
}

Status read_lengths(const lla_cache_append_args& a, CacheAppendCall& call) {
  const NamedTensor lengths{"seqlens", a.seqlens};
  LLA_RETURN_IF_ERROR(check_int_vector(lengths, a.k, Pointers::required, "(B)"));
  if (a.k.ndim == 3) {
    const NamedTensor cu{"cu_seqlens", a.cu_seqlens};
    if (!present(a.cu_seqlens)) return invalid("cu_seqlens: is absent, but k is packed");
    int64_t longest = 0;
    LLA_RETURN_IF_ERROR(read_cu_seqlens(cu, {"total", 0}, a.k, Pointers::required, call.total, longest));
    call.batch = a.cu_seqlens.size[0] - 1;
    call.cu_seqlens = static_cast<const int32_t*>(a.cu_seqlens.data);
    if (call.device == Device::cpu) LLA_RETURN_IF_ERROR(check_cu_seqlens(cu, call.total, "the total", call.total));
  } else if (present(a.cu_seqlens)) {
    return invalid("cu_seqlens: is given, but k is not packed (total, Hkv, D)");
  }
  LLA_RETURN_IF_ERROR(check_shape(lengths, {call.batch}, "(B)"));
  call.cache.lengths = static_cast<const int32_t*>(a.seqlens.data);
  return read_pages({"k_cache", a.k_cache}, {"page_table", a.page_table}, call.batch, Pointers::required, call.cache,
                    call.cache.max_length);
}

Status read_slots(const lla_cache_append_args& a, CacheAppendCall& call) {
  const NamedTensor slots{"slots", a.slots};
  for (const NamedTensor& t : {NamedTensor{"page_table", a.page_table}, NamedTensor{"cu_seqlens", a.cu_seqlens}}) {
    if (present(t.tensor)) return invalid(cat(t.name, ": is given beside slots, which say everything"));
  }
  LLA_RETURN_IF_ERROR(check_view(slots, Pointers::required));
  LLA_RETURN_IF_ERROR(check_dtype(slots, {DType::i64}, "i64"));
  LLA_RETURN_IF_ERROR(same_device(slots, a.k));
  if (a.k.ndim == 3) {
    LLA_RETURN_IF_ERROR(check_shape(slots, {call.total}, "(total)"));
  } else {
    LLA_RETURN_IF_ERROR(check_shape(slots, {call.batch, call.length}, "(B, Lnew)"));
  }
  LLA_RETURN_IF_ERROR(check_contiguous(slots));
  call.by_slots = true;
  call.slots = static_cast<const int64_t*>(a.slots.data);
  call.cache.pages = a.k_cache.size[0];
  return {};
}

Status read_status(const lla_cache_append_args& a, CacheAppendCall& call) {
  const NamedTensor status{"status", a.status};
  if (!present(a.status)) return {};
  LLA_RETURN_IF_ERROR(check_view(status, Pointers::required));
  LLA_RETURN_IF_ERROR(check_dtype(status, {DType::i32}, "i32"));
  LLA_RETURN_IF_ERROR(same_device(status, a.k));
  if (present(a.seqlens)) {
    LLA_RETURN_IF_ERROR(check_shape(status, {call.batch}, "(B)"));
  } else if (a.k.ndim == 3) {
    LLA_RETURN_IF_ERROR(check_shape(status, {call.total}, "(total)"));
  } else {
    LLA_RETURN_IF_ERROR(check_shape(status, {call.batch, call.length}, "(B, Lnew)"));
  }
  call.status = static_cast<int32_t*>(a.status.data);
  return check_contiguous(status);
}

Status read_new_lengths(const lla_cache_append_args& a, CacheAppendCall& call) {
  const NamedTensor lengths{"new_seqlens", a.new_seqlens};
  if (!present(a.new_seqlens)) return {};
  if (!present(a.seqlens)) return invalid("new_seqlens: is given beside slots, which say nothing of lengths");
  LLA_RETURN_IF_ERROR(check_int_vector(lengths, a.k, Pointers::required, "(B)"));
  LLA_RETURN_IF_ERROR(check_shape(lengths, {call.batch}, "(B)"));
  call.new_lengths = static_cast<int32_t*>(a.new_seqlens.data);
  return {};
}

// The places that lengths and pages, or slots, name: where the host can read them.
Status check_places(const CacheAppendCall& c) {
  std::vector<int64_t> places;
  if (c.by_slots) {
    for (int64_t i = 0; i < c.batch * c.length; ++i) {
      if (c.slots[i] == -1) continue;
      if (!is_slot(c, c.slots[i])) {
        return invalid(cat("slots: token ", i, " has slot ", c.slots[i], ", must be -1 to ",
                           c.cache.pages * c.slots_per_page - 1));
      }
      places.push_back(c.slots[i]);
    }
  } else {
    for (int64_t b = 0; b < c.batch; ++b) {
      const NewTokens n = new_tokens(c, b);
      if (!n.valid) {
        return invalid(cat("seqlens: sequence ", b, " has length ", n.position, " and ", n.count,
                           " new tokens, which do not fit a cache of ", c.cache.max_length));
      }
      LLA_RETURN_IF_ERROR(check_pages(c.cache, b, n.position, n.position + n.count));
      if (c.cache.table == nullptr) continue;  // every sequence has places of its own
      for (int64_t t = 0; t < n.count; ++t) {
        const CachePlace place = place_of_key(c, b, n.position + t);
        places.push_back(place.page * c.slots_per_page + place.slot);
      }
    }
  }
  std::sort(places.begin(), places.end());
  const auto twice = std::adjacent_find(places.begin(), places.end());
  if (twice == places.end()) return {};
  return invalid(cat(c.by_slots ? "slots: two tokens" : "page_table: new tokens of two sequences",
                     " have the same place, slot ", *twice % c.slots_per_page, " of page ", *twice / c.slots_per_page));
}

}  // namespace

Status validate(const lla_cache_append_args& a, CacheAppendCall& call) {
  LLA_RETURN_IF_ERROR(read_tensors(a, call));
  if (present(a.seqlens) == present(a.slots)) {
    return invalid(present(a.slots) ? "slots: is given together with seqlens; give exactly one"
                                    : "seqlens: is absent, and so is slots; give exactly one");
  }
  LLA_RETURN_IF_ERROR(present(a.seqlens) ? read_lengths(a, call) : read_slots(a, call));
  LLA_RETURN_IF_ERROR(read_status(a, call));
  LLA_RETURN_IF_ERROR(read_new_lengths(a, call));
  const NamedTensor read[] = {{"k", a.k},
                              {"v", a.v},
                              {"seqlens", a.seqlens},
                              {"slots", a.slots},
                              {"page_table", a.page_table},
                              {"cu_seqlens", a.cu_seqlens}};
  const NamedTensor written[] = {
      {"k_cache", a.k_cache}, {"v_cache", a.v_cache}, {"status", a.status}, {"new_seqlens", a.new_seqlens}};
  LLA_RETURN_IF_ERROR(distinct(read, written));
  return call.device == Device::cpu ? check_places(call) : Status();
}

}  // namespace lla::core
