// Synthetic attention inputs: six kinds from harmless to hard, those of trained attention (peaked.cpp) and degenerate
// ones (degenerate.cpp), reproducible on any machine. python/lla/_data.py is its twin and makes the same numbers (to the
// rounding of log, sin and cos); tests/golden/data.txt holds both to it.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace lla::data {

enum class Kind {
  randn,    // q, k, v ~ N(0, 1)
  aniso,    // q and k with standard deviations ~ i^(-1/2) over the dimensions i = 1 ... D, of rms 1
  self,     // each query near its own key, twice as long: q = 2 (k + 0.1 N(0, 1))
  cluster,  // keys and queries around 16 shared centres, spread 0.3, each vector of rms 1
  pw,       // the paper's piecewise linear data, segments of 128: v = A_c k in segment c, A_c ~ N(0, 1/D); q = k
  mean,     // keys with a large common mean: k + 3 mu, mu ~ N(0, I)

  // What trained attention has.
  long_both,       // q and k four times as long: logits of +-50
  qk_norm,         // q and k of rms 2.5 each
  queries6,        // queries six times as long
  queries20,       // ... twenty times
  two_channels,    // the first two channels of the keys with spread 20
  rope,            // channel means of +-2 in q and k, then rotary positions
  sink,            // a far first key, of length 20, that every query leans to, with a small value
  mean10,          // k + 10 mu
  mean30,          // k + 30 mu
  channel_scales,  // q and k with channels of size 1e2 ... 1e-4

  // Degenerate but ordinary: randn, changed.
  equal_values,  // every value the same
  equal_keys,    // every key
  equal_pairs,   // every key and every value
  one_token,     // every query, key and value
  two_tokens,    // the same two in turn
  zero_queries,  // ... keys, values all zero
  zero_keys,
  zero_values,
  mean_query,       // queries that are the mean key, in every other row to the last digit
  one_large_value,  // one value, key 300 times longer than the others
  one_large_key,
  short_keys,    // keys times 1e-4
  long_keys,     // keys times 100
  long_queries,  // queries times 30
  padding,       // the first and the last quarter of all rows zero
};

inline constexpr Kind kinds[] = {Kind::randn, Kind::aniso, Kind::self, Kind::cluster, Kind::pw, Kind::mean};
inline constexpr Kind peaked_kinds[] = {Kind::long_both,    Kind::qk_norm, Kind::queries6, Kind::queries20,
                                        Kind::two_channels, Kind::rope,    Kind::sink,     Kind::mean10,
                                        Kind::mean30,       Kind::channel_scales};
inline constexpr Kind degenerate_kinds[] = {
    Kind::equal_values,  Kind::equal_keys, Kind::equal_pairs, Kind::one_token,    Kind::two_tokens,
    Kind::zero_queries,  Kind::zero_keys,  Kind::zero_values, Kind::mean_query,   Kind::one_large_value,
    Kind::one_large_key, Kind::short_keys, Kind::long_keys,   Kind::long_queries, Kind::padding};
const char* name(Kind kind);
std::optional<Kind> find_kind(std::string_view name);

// The generator: a hash of (seed, stream, index), so any element can be made alone.
double uniform(uint64_t seed, uint64_t stream, uint64_t index);  // in (0, 1)
double normal(uint64_t seed, uint64_t stream, uint64_t index);

struct Sizes {
  int64_t batch, length_q, length_k, heads_q, heads_kv, dim, value_dim;
};

// Row-major q (batch, length_q, heads_q, dim), k (batch, length_k, heads_kv, dim), v (batch, length_k, heads_kv,
// value_dim). Kinds that tie queries to keys align the last query with the last key; a query before the first key is
// tied to the first.
struct Tensors {
  std::vector<double> q, k, v;
};

Tensors make(Kind kind, uint64_t seed, const Sizes& sizes);

}  // namespace lla::data
