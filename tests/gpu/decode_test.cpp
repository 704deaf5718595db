// Decoding over caches of bf16 and f16 against each sequence alone in fp64: data kinds and ridges, pages of every size,
// strides the copy engine does not take, lengths that break their bound, rows with hardly any keys.
#include <algorithm>
#include <array>
#include <cmath>
#include <random>

#include "core/text.hpp"
#include "cuda/sm90/decode/short.hpp"
#include "gpu/cache_cases.hpp"
#include "gpu/gpu_test.hpp"
#include "support/real_cases.hpp"

namespace lla::test {
namespace {

CacheSpec decoding(int64_t dim, std::vector<CachedSequence> sequences, int64_t page_size = 0) {
  return bf16_cache(dim, std::move(sequences), page_size);
}

// Four keys eight times as long as the others, and queries that lean to them.
void add_sinks(const CacheSpec& spec, std::vector<Inputs>& inputs) {
  for (size_t b = 0; b < inputs.size(); ++b) {
    const double lean =
        std::sqrt(static_cast<double>(spec.dim)) * std::log(static_cast<double>(spec.sequences[b].keys));
    for (int64_t head = 0; head < spec.heads_kv; ++head) {
      for (int64_t key = 0; key < std::min<int64_t>(4, spec.sequences[b].keys); ++key) {
        double squares = 0;
        const auto at = [&](int64_t d) { return static_cast<size_t>((key * spec.heads_kv + head) * spec.dim + d); };
        for (int64_t d = 0; d < spec.dim; ++d) squares += std::pow(inputs[b].k[at(d)] *= 8, 2);
        const int64_t group = spec.heads_q / spec.heads_kv;
        for (int64_t of_head = head * group; of_head < (head + 1) * group; ++of_head) {
          for (int64_t d = 0; d < spec.dim; ++d) {
            double& q = inputs[b].q[static_cast<size_t>(of_head * spec.dim + d)];
            q = rounded(q + inputs[b].k[at(d)] / squares * lean, spec.dtype);
          }
        }
      }
    }
  }
}

class GpuDecode : public OnGpu {
 protected:
  static int multiprocessors() {
    cudaDeviceProp device{};
    cudaGetDeviceProperties(&device, 0);
    return device.multiProcessorCount;
  }

  // Few key heads with a query each may have a kernel of their own, if the call is not ragged: such calls as they are, and
  // with the same queries by cu_seqlens.
  std::vector<CacheSpec> either_way(const CacheSpec& spec) const {
    const auto key_heads = static_cast<int64_t>(spec.sequences.size()) * spec.heads_kv;
    bool one_query = !spec.packed && implementation() == "sm90";
    for (const CachedSequence& sequence : spec.sequences) one_query = one_query && sequence.rows == 1;
    std::vector<CacheSpec> ways{spec};
    if (one_query && cuda::sm90::decode::cluster_of(key_heads, multiprocessors()) > 0) {
      ways.push_back(spec);
      ways.back().packed = true;
    }
    return ways;
  }

  void expect_right(const CacheSpec& given, data::Kind kind = data::Kind::randn, double ridge = 0.1,
                    double gate = 2.5e-3) {
    for (const CacheSpec& spec : either_way(given)) expect_right_as_it_is(spec, kind, ridge, gate);
  }
  void expect_right_as_it_is(const CacheSpec& spec, data::Kind kind, double ridge, double gate) {
    if (!takes_cache(implementation(), spec)) GTEST_SKIP() << lla_last_error();
    const std::vector<Inputs> inputs = make_cache_inputs(spec, kind, ridge, 20261116);
    const CacheForward got = run_cache(spec, inputs, implementation()), want = cache_oracle(spec, inputs);
    ASSERT_EQ(got.status, LLA_OK) << got.message << ": " << spec.text();
    for (size_t b = 0; b < spec.sequences.size(); ++b) {
      EXPECT_LE(relative_error(got.o[b], want.o[b]), gate) << "sequence " << b << " of " << spec.text();
      for (const int status : got.row_status[b]) EXPECT_EQ(status, LLA_ROW_OK) << "sequence " << b;
    }
  }

  // No row that says OK is off by more than a hundredth; at most a share of the rows does not say it, of harmless data
  // none.
  void expect_true_statuses(const CacheSpec& given, data::Kind kind, double ridge) {
    for (const bool sinks : {false, true}) {
      if (sinks && kind != data::Kind::randn) continue;
      if (!takes_cache(implementation(), given)) GTEST_SKIP() << lla_last_error();
      std::vector<Inputs> inputs = make_cache_inputs(given, kind, ridge, 5);
      if (sinks) add_sinks(given, inputs);
      const CacheForward want = cache_oracle(given, inputs);
      for (const CacheSpec& spec : either_way(given)) {
        const CacheForward got = run_cache(spec, inputs, implementation());
        ASSERT_EQ(got.status, LLA_OK) << got.message;
        SCOPED_TRACE(core::cat(data::name(kind), sinks ? ", four sinks" : "", ", ridge ", ridge, ", ", spec.text()));
        expect_true_statuses(spec, kind, ridge, sinks, got, want);
      }
    }
  }
  void expect_true_statuses(const CacheSpec& spec, data::Kind kind, double ridge, bool sinks, const CacheForward& got,
                            const CacheForward& want) {
    size_t rows = 0, doubted = 0;
    for (size_t b = 0; b < spec.sequences.size(); ++b) {
      for (int64_t head = 0; head < spec.heads_q; ++head, ++rows) {
        const auto row = [&](const std::vector<double>& o) {
          return std::vector<double>(o.begin() + head * spec.dim, o.begin() + (head + 1) * spec.dim);
        };
        if (got.row_status[b][static_cast<size_t>(head)] != LLA_ROW_OK) {
          ++doubted;
        } else if (kind != data::Kind::zero_values) {
          EXPECT_LE(relative_error(row(got.o[b]), row(want.o[b])), 1e-2) << "sequence " << b << ", head " << head;
        }
      }
    }
    // Queries and keys four times as long, queries twenty times and far sinks err by so much that many are. In groups
    // those with a far mean, too: a second pass sums up the keys as they are.
    const bool mean = spec.heads_q > spec.heads_kv && kind == data::Kind::mean30;
    const bool may = ridge < 0.01 || sinks || mean || kind == data::Kind::long_both || kind == data::Kind::queries20;
    EXPECT_LE(doubted, ridge > 0.01 && !sinks ? 0 : may ? rows : rows / 6);
  }
};
LLA_EACH_CUDA_IMPLEMENTATION(GpuDecode);

TEST_P(GpuDecode, DataKindsAndRidges) {
  for (const data::Kind kind : data::kinds) {
    for (const int64_t dim : {64, 128}) {
      for (const double ridge : {1.0, 0.1, 0.01}) {
        SCOPED_TRACE(data::name(kind));
        expect_right(decoding(dim, {{1, 3000}, {1, 129}, {1, 700}, {1, 64}}), kind, ridge);
        if (HasFailure() || IsSkipped()) return;
      }
    }
  }
}

TEST_P(GpuDecode, PagesOfAnySize) {
  for (const int64_t page_size : {1, 2, 7, 8, 16, 48, 128}) {
    for (const PageOrder order : {PageOrder::shuffled, PageOrder::shared}) {
      CacheSpec spec = decoding(128, {{1, 1000}, {1, 37}, {1, 1000}, {1, 5}}, page_size);
      spec.order = order;
      expect_right(spec);
      spec.ridge = RidgeShape::none;
      expect_right(spec);
      if (HasFailure() || IsSkipped()) return;
    }
  }
}

TEST_P(GpuDecode, StridesTypesAndHeadDimensions) {
  for (const Layout layout : {Layout::dense, Layout::head_major, Layout::padded, Layout::scattered}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const auto& [dim, value_dim] : {std::pair<int64_t, int64_t>{64, 64}, {96, 128}, {40, 16}, {128, 72}}) {
        CacheSpec spec = decoding(dim, {{1, 300}, {1, 20}, {1, 131}}, layout == Layout::padded ? 16 : 0);
        spec.value_dim = value_dim;
        spec.layout = layout;
        spec.dtype = dtype;
        expect_right(spec);
        spec.ridge = RidgeShape::none;
        expect_right(spec);
        if (HasFailure() || IsSkipped()) return;
      }
    }
  }
}

TEST_P(GpuDecode, RidgeShapes) {
  for (const RidgeShape ridge : {RidgeShape::scalar, RidgeShape::head, RidgeShape::token, RidgeShape::dimension}) {
    CacheSpec spec = decoding(64, {{1, 300}, {1, 20}, {1, 131}}, 16);
    spec.ridge = ridge;
    expect_right(spec);
    if (HasFailure() || IsSkipped()) return;
  }
}

TEST_P(GpuDecode, SeveralQueriesGroupsWindowsAndPadding) {
  for (const int64_t left : {-1, 40, 300}) {
    CacheSpec spec = decoding(128, {{4, 500}, {1, 900, 33}, {0, 10}, {3, 3}, {2, 700, 699}}, 16);
    spec.packed = true;
    spec.heads_q = 4;
    spec.options.window_left = left;
    expect_right(spec);
    spec.ridge = RidgeShape::none;
    expect_right(spec);
    if (HasFailure() || IsSkipped()) return;
  }
}

// Rows of a key head share a pass over its keys where they can: groups and queries of every number around what fits. Few
// rows of dense calls have a pass each at head dimension 128, those of ragged ones two passes together.
TEST_P(GpuDecode, GroupsOfEverySize) {
  for (const int64_t group : {1, 2, 3, 4, 5, 7, 8, 9, 16, 20, 32}) {
    for (const int64_t dim : {64, 128}) {
      for (const RidgeShape ridge : {RidgeShape::token, RidgeShape::none}) {
        for (const bool ragged : {false, true}) {
          CacheSpec spec = decoding(dim, {{1, 700}, {1, 37}, {1, 2100}}, group % 2 == 0 ? 16 : group == 9 ? 1 : 0);
          spec.heads_q = 2 * group;
          spec.dtype = group % 3 == 0 ? DType::f16 : DType::bf16;
          spec.ridge = ridge;
          spec.packed = ragged;
          expect_right(spec);
          if (HasFailure() || IsSkipped()) return;
        }
      }
    }
  }
}

TEST_P(GpuDecode, GroupsOfDataKindsAndRidges) {
  for (const data::Kind kind : data::kinds) {
    for (const int64_t dim : {64, 128}) {
      for (const double ridge : {1.0, 0.1, 0.01}) {
        SCOPED_TRACE(data::name(kind));
        CacheSpec spec = decoding(dim, {{1, 2100}, {1, 129}, {1, 64}});
        spec.heads_q = 6;
        spec.packed = true;
        expect_right(spec, kind, ridge);
        if (HasFailure() || IsSkipped()) return;
      }
    }
  }
}

// Means and weights of every size: rows of a group are multiplied with or without a shift, in two parts or in three.
TEST_P(GpuDecode, GroupsOfPeakedKinds) {
  for (const data::Kind kind : {data::Kind::queries6, data::Kind::mean10, data::Kind::mean30}) {
    for (const int64_t dim : {64, 128}) {
      for (const double ridge : {1.0, 0.1, 0.01}) {
        SCOPED_TRACE(data::name(kind));
        CacheSpec spec = decoding(dim, {{1, 2100}, {1, 600}});
        spec.heads_q = 8;
        spec.packed = true;
        expect_right(spec, kind, ridge);
        if (HasFailure() || IsSkipped()) return;
      }
    }
  }
}

// At head dimension 64 a group takes two passes only where there are many key heads.
TEST_P(GpuDecode, GroupsOfManyKeyHeads) {
  std::vector<CachedSequence> sequences;
  for (int64_t b = 0; b < 64; ++b) sequences.push_back({1, b % 16 == 0 ? 1500 : 40 + 5 * b});
  for (const data::Kind kind : {data::Kind::randn, data::Kind::queries6, data::Kind::mean30}) {
    for (const int64_t group : {3, 4, 7}) {
      SCOPED_TRACE(data::name(kind));
      CacheSpec spec = decoding(64, sequences, group == 4 ? 16 : 0);
      spec.heads_q = 2 * group;
      expect_right(spec, kind);
      if (HasFailure() || IsSkipped()) return;
    }
  }
}

TEST_P(GpuDecode, QueriesOfEveryNumber) {
  for (const int64_t queries : {2, 3, 4, 6, 8, 10}) {
    for (const int64_t left : {-1, 100}) {
      for (const RidgeShape ridge : {RidgeShape::token, RidgeShape::none}) {
        CacheSpec spec = decoding(left < 0 ? 64 : 128, {{queries, 900}, {queries, 150}, {queries, queries}}, 16);
        spec.heads_q = queries < 6 ? 6 : 2;
        spec.options.window_left = left;
        spec.options.batch_invariant = queries % 2 == 0;  // whose few rows take two passes
        spec.ridge = ridge;
        expect_right(spec);
        if (HasFailure() || IsSkipped()) return;
      }
    }
  }
}

// What another row of the same key head holds changes no bit, NaN included; nor does a key that only later queries see.
TEST_P(GpuDecode, RowsOfAKeyHeadKeepTheirBits) {
  for (const int64_t dim : {64, 128}) {
    for (const RidgeShape ridge : {RidgeShape::token, RidgeShape::none}) {
      CacheSpec spec = decoding(dim, {{2, 1500}, {2, 45}}, 16);
      spec.heads_q = 8;
      spec.ridge = ridge;
      spec.options.batch_invariant = 1;  // whose few rows take two passes at head dimension 128
      if (!takes_cache(implementation(), spec)) GTEST_SKIP() << lla_last_error();
      const std::vector<Inputs> inputs = make_cache_inputs(spec, data::Kind::randn, 0.1, 5);
      const CacheForward want = run_cache(spec, inputs, implementation());
      ASSERT_EQ(want.status, LLA_OK) << want.message;
      const auto row = [&](const std::vector<double>& t, int64_t query, int64_t head) {
        const auto at = t.begin() + (query * spec.heads_q + head) * dim;
        return std::vector<double>(at, at + dim);
      };
      for (const double by : {16.0, std::nan("")}) {
        std::vector<Inputs> others = inputs;
        for (int64_t d = 0; d < dim; ++d) {  // query 0 of head 2, in the first sequence
          others[0].q[static_cast<size_t>(2 * dim + d)] *= by;
          if (ridge == RidgeShape::none) others[0].x[static_cast<size_t>(2 * dim + d)] *= by;
        }
        const CacheForward got = run_cache(spec, others, implementation());
        EXPECT_TRUE(identical(got.o[1], want.o[1]));
        for (int64_t query = 0; query < 2; ++query) {
          for (int64_t head = 0; head < 8; ++head) {
            const bool same = identical(row(got.o[0], query, head), row(want.o[0], query, head));
            EXPECT_EQ(same, query != 0 || head != 2) << "query " << query << ", head " << head << ", D " << dim;
          }
        }
      }
      for (const bool key : {false, true}) {
        std::vector<Inputs> last = inputs;  // both key heads of the last key, which the last query alone sees
        std::vector<double>& t = key ? last[0].k : last[0].v;
        std::fill(t.end() - 2 * dim, t.end(), key ? std::nan("") : INFINITY);
        const CacheForward got = run_cache(spec, last, implementation());
        EXPECT_TRUE(identical(got.o[1], want.o[1]));
        for (int64_t head = 0; head < 8; ++head) {
          EXPECT_TRUE(identical(row(got.o[0], 0, head), row(want.o[0], 0, head))) << "head " << head << ", D " << dim;
          for (const double o : row(got.o[0], 1, head)) EXPECT_FALSE(std::isfinite(o)) << "head " << head;
        }
      }
    }
  }
}

// Wherever a key or a value is that is not finite, and however little its weight: rows that see it are NaN and say so,
// all others keep their bits. With weights that underflow, in parts of a row whose weights all do, and in few keys.
TEST_P(GpuDecode, NotFiniteAnywhere) {
  std::mt19937 draw(20261119);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(draw() % static_cast<uint64_t>(n)); };
  for (const int64_t dim : {64, 128}) {
    for (const int64_t group : {1, 4}) {
      for (const RidgeShape ridge : {RidgeShape::token, RidgeShape::none}) {
        for (const double longer : {1.0, 300.0}) {
          CacheSpec spec = decoding(dim, {{1, 2100}, {1, 700}, {1, 130}, {1, 20}}, below(2) * 16);
          spec.heads_q = 2 * group;
          spec.ridge = ridge;
          spec.options.batch_invariant = group > 1 && below(2) == 0;  // whose few rows take two passes
          if (!takes_cache(implementation(), spec)) GTEST_SKIP() << lla_last_error();
          std::vector<Inputs> inputs = make_cache_inputs(spec, data::Kind::randn, 0.1, 9);
          for (Inputs& own : inputs) {
            for (double& q : own.q) q *= longer;
          }
          const CacheForward clean = run_cache(spec, inputs, implementation());
          ASSERT_EQ(clean.status, LLA_OK) << clean.message;
          for (int drawn = 0; drawn < (reduced() ? 2 : 4); ++drawn) {
            const auto sequence = static_cast<size_t>(drawn % 4);
            const int64_t keys = spec.sequences[sequence].keys, head = below(2), at = below(keys);
            const bool in_key = below(2) == 0;
            const double poison = std::array<double, 3>{std::nan(""), INFINITY, -INFINITY}[draw() % 3];
            std::vector<Inputs> poisoned = inputs;
            (in_key ? poisoned[sequence].k
                    : poisoned[sequence].v)[static_cast<size_t>((at * 2 + head) * dim + below(dim))] = poison;
            const CacheForward got = run_cache(spec, poisoned, implementation());
            ASSERT_EQ(got.status, LLA_OK) << got.message;
            SCOPED_TRACE(core::cat(ridge == RidgeShape::none ? "x given, " : "solved, ", poison,
                                   in_key ? " in key " : " in value ", at, " of ", keys, ", key head ", head,
                                   ", queries times ", longer, ", ", spec.text()));
            for (size_t b = 0; b < inputs.size(); ++b) {
              for (int64_t h = 0; h < spec.heads_q; ++h) {
                const auto row = [&](const std::vector<double>& o) {
                  return std::vector<double>(o.begin() + h * dim, o.begin() + (h + 1) * dim);
                };
                if (b != sequence || h / group != head) {
                  EXPECT_TRUE(identical(row(got.o[b]), row(clean.o[b]))) << "sequence " << b << ", head " << h;
                  continue;
                }
                const std::vector<double> o = row(got.o[b]);
                const auto numbers = std::count_if(o.begin(), o.end(), [](double x) { return !std::isnan(x); });
                EXPECT_EQ(numbers, 0) << "head " << h << ", largest " << *std::max_element(o.begin(), o.end());
                EXPECT_EQ(got.row_status[b][static_cast<size_t>(h)], LLA_ROW_NAN) << "head " << h;
              }
            }
          }
        }
      }
    }
  }
}

// One key gives its value, to the last bit; two to D + 1 keys are solved as well as elsewhere.
TEST_P(GpuDecode, RowsWithFewKeys) {
  for (const int64_t dim : {64, 128}) {
    CacheSpec one = decoding(dim, {{1, 1}, {1, 1}});
    if (!takes_cache(implementation(), one)) GTEST_SKIP() << lla_last_error();
    const std::vector<Inputs> inputs = make_cache_inputs(one, data::Kind::randn, 0, 3);
    const CacheForward got = run_cache(one, inputs, implementation());
    ASSERT_EQ(got.status, LLA_OK) << got.message;
    for (size_t b = 0; b < 2; ++b) EXPECT_TRUE(identical(got.o[b], inputs[b].v));
    expect_right(decoding(dim, {{1, 2}, {1, 3}, {1, 17}, {1, dim}, {1, dim + 1}}));
  }
}

// A length out of bounds: NaN and a status for that sequence, and the others have the bits they have beside the nearest
// length that is allowed, however much of the GPU that one takes.
template <int32_t kLength>
void second_length_is(lla_forward_args& a) {
  a.max_seqlen_k = 4000;
  write_int(a.seqlens_k, 1, kLength);
}
TEST_P(GpuDecode, LengthsOutOfBounds) {
  struct Case {
    CacheEdit edit, nearest;
  };
  const Case cases[] = {{second_length_is<7000>, second_length_is<4000>},
                        {second_length_is<1 << 30>, second_length_is<4000>},
                        {second_length_is<-5>, second_length_is<0>}};
  for (const RidgeShape ridge : {RidgeShape::token, RidgeShape::none}) {
    for (const int64_t group : {1, 4}) {
      CacheSpec spec = decoding(64, {{1, 2300}, {1, 7000}, {1, 1150}}, 16);
      spec.ridge = ridge;
      spec.heads_q = group * spec.heads_kv;
      if (!takes_cache(implementation(), spec)) GTEST_SKIP() << lla_last_error();
      const std::vector<Inputs> inputs = make_cache_inputs(spec, data::Kind::randn, 0.1, 5);
      const CacheForward oracle = cache_oracle(spec, inputs);
      for (const Case& c : cases) {
        const CacheForward want = run_cache(spec, inputs, implementation(), c.nearest);
        const CacheForward got = run_cache(spec, inputs, implementation(), c.edit);
        ASSERT_EQ(got.status, LLA_OK) << got.message;
        expect_invalid_rows(got, 1);
        for (const int status : want.row_status[1]) EXPECT_EQ(status, LLA_ROW_OK);
        for (const size_t b : {0, 2}) {
          EXPECT_TRUE(identical(got.o[b], want.o[b])) << "sequence " << b << ", case " << &c - cases;
          EXPECT_LE(relative_error(got.o[b], oracle.o[b]), 2.5e-3);
        }
      }
    }
  }
}

// A sequence that claims more rows than the host's bound of them: all of its rows say so, and the others, which are more
// than there are multiprocessors, are right.
TEST_P(GpuDecode, MoreRowsThanTheirBound) {
  for (const int64_t dim : {64, 128}) {
    for (const RidgeShape ridge : {RidgeShape::token, RidgeShape::none}) {
      for (const int64_t group : {1, 4}) {
        std::vector<CachedSequence> sequences(40, {1, 300});
        sequences[1] = {3, 300}, sequences[2] = {0, 300};
        CacheSpec spec = decoding(dim, sequences);
        spec.ridge = ridge;
        spec.packed = true;
        spec.heads_kv = 8, spec.heads_q = 8 * group;
        if (!takes_cache(implementation(), spec)) GTEST_SKIP() << lla_last_error();
        const std::vector<Inputs> inputs = make_cache_inputs(spec, data::Kind::randn, 0.1, 5);
        const CacheForward oracle = cache_oracle(spec, inputs);
        const CacheForward got =
            run_cache(spec, inputs, implementation(), [](lla_forward_args& a) { a.max_seqlen_q = 1; });
        ASSERT_EQ(got.status, LLA_OK) << got.message;
        for (size_t b = 0; b < sequences.size(); ++b) {
          if (b == 1) {
            expect_invalid_rows(got, b);
            continue;
          }
          EXPECT_LE(relative_error(got.o[b], oracle.o[b]), 2.5e-3) << "sequence " << b << " of " << spec.text();
          for (const int status : got.row_status[b]) EXPECT_EQ(status, LLA_ROW_OK) << "sequence " << b;
        }
      }
    }
  }
}

// Data that takes from a solve's sums what they hold; randn once more with four sinks.
constexpr data::Kind kKindsThatLose[] = {data::Kind::randn,    data::Kind::long_both,  data::Kind::qk_norm,
                                         data::Kind::queries6, data::Kind::queries20,  data::Kind::two_channels,
                                         data::Kind::rope,     data::Kind::sink,       data::Kind::mean10,
                                         data::Kind::mean30,   data::Kind::zero_values};

// No row that says OK is off by more than a hundredth, and rows are not doubted without cause. A group of four makes two
// passes where a kernel has them: at head dimension 128 when cut by length, at 64 with many key heads.
TEST_P(GpuDecode, StatusesAreTrue) {
  for (const double ridge : {0.1, 0.01, 1e-3}) {
    for (const data::Kind kind : kKindsThatLose) {
      for (const int64_t dim : {64, 128}) {
        for (const int64_t group : {1, 4}) {
          CacheSpec spec = decoding(dim, {});
          for (const int64_t keys : {40, 300, 600}) spec.sequences.push_back({1, keys});
          if (group == 1) spec.sequences.insert(spec.sequences.end(), {{1, 40}, {1, 300}, {1, 600}});
          spec.heads_q = spec.heads_kv * group;
          spec.options.batch_invariant = group > 1;
          expect_true_statuses(spec, kind, ridge);
          if (HasFatalFailure() || IsSkipped()) return;
        }
      }
    }
  }
}

TEST_P(GpuDecode, StatusesOfManyKeyHeadsAreTrue) {
  CacheSpec spec = decoding(64, {});
  for (int64_t b = 0; b < 64; ++b) spec.sequences.push_back({1, b % 16 == 0 ? 300 : 20 + b});
  spec.heads_q = 3 * spec.heads_kv;
  for (const double ridge : {0.01, 1e-3}) {
    for (const data::Kind kind : {data::Kind::long_both, data::Kind::rope, data::Kind::mean30}) {
      expect_true_statuses(spec, kind, ridge);
      if (HasFatalFailure() || IsSkipped()) return;
    }
  }
}

// Heads of a language model in training: their last queries together over each head's keys, of many lengths. There are
// enough sequences for the kernels that share keys between rows at head dimension 64.
TEST_P(GpuDecode, RealHeads) {
  constexpr int64_t kRows = 4;
  const std::vector<RealCase> heads = real_cases();
  CacheSpec spec = decoding(heads[0].spec.dim, {});
  spec.heads_q = spec.heads_kv = 1;
  std::vector<Inputs> inputs;
  for (size_t b = 0; b < 132; ++b) {
    const RealCase& head = heads[b % heads.size()];
    const int64_t keys = head.spec.length_k - static_cast<int64_t>(b / heads.size()) * 3;
    spec.sequences.push_back({kRows, keys});
    inputs.push_back(last_rows(head, kRows, keys));
  }
  if (!takes_cache(implementation(), spec)) GTEST_SKIP() << lla_last_error();
  const CacheForward got = run_cache(spec, inputs, implementation()), want = cache_oracle(spec, inputs);
  ASSERT_EQ(got.status, LLA_OK) << got.message;
  for (size_t b = 0; b < inputs.size(); ++b) {
    EXPECT_LE(relative_error(got.o[b], want.o[b]), 2.5e-3) << heads[b % heads.size()].name << ", sequence " << b;
    for (const int status : got.row_status[b]) EXPECT_EQ(status, LLA_ROW_OK) << heads[b % heads.size()].name;
  }
}

// A kernel that scales by what a row's first keys and values show has to notice later ones that are too large for it,
// also where only some of the rows have them. Once with a scale for each part of a row, once with parts by position.
TEST_P(GpuDecode, ValuesThatOutgrowTheFirst) {
  for (const int64_t dim : {64, 128}) {
    for (const double growth : {0x1p12, 0x1p20}) {
      for (const bool invariant : {false, true}) {
        CacheSpec spec = decoding(dim, {{1, 3000}, {1, 129}, {1, 700}, {1, 2600}}, 16);
        spec.options.batch_invariant = invariant;
        if (!takes_cache(implementation(), spec)) GTEST_SKIP() << lla_last_error();
        std::vector<Inputs> inputs = make_cache_inputs(spec, data::Kind::randn, 0.1, 20261116);
        for (const size_t b : {0, 2}) {
          for (auto e = static_cast<size_t>(400 * 2 * dim); e < inputs[b].v.size(); ++e) inputs[b].v[e] *= growth;
        }
        const CacheForward got = run_cache(spec, inputs, implementation()), want = cache_oracle(spec, inputs);
        ASSERT_EQ(got.status, LLA_OK) << got.message;
        for (size_t b = 0; b < spec.sequences.size(); ++b) {
          EXPECT_LE(relative_error(got.o[b], want.o[b]), 2.5e-3) << "sequence " << b << ", dim " << dim;
          for (const int status : got.row_status[b]) EXPECT_EQ(status, LLA_ROW_OK) << "sequence " << b;
        }
      }
    }
  }
}

// Sums are relative to a maximum that may rise anywhere in a row, long after the first of them have been put away. Parts by
// position have the same places in every batch; the others are short here.
TEST_P(GpuDecode, LogitsThatRise) {
  for (const int64_t dim : {64, 128}) {
    for (const int64_t from : {100, 600, 1100, 1500, 2300, 2700, 3400}) {
      for (const int64_t group : {1, 2}) {
        CacheSpec spec = decoding(dim, {{1, 5000}, {1, 3500}}, group == 1 ? 0 : 16);
        spec.heads_q = 2 * group;
        spec.options.batch_invariant = 1;
        if (!takes_cache(implementation(), spec)) GTEST_SKIP() << lla_last_error();
        std::vector<Inputs> inputs = make_cache_inputs(spec, data::Kind::randn, 0.1, 7);
        lengthen_keys(spec, inputs, from);
        const CacheForward got = run_cache(spec, inputs, implementation()), want = cache_oracle(spec, inputs);
        ASSERT_EQ(got.status, LLA_OK) << got.message;
        for (size_t b = 0; b < spec.sequences.size(); ++b) {
          EXPECT_LE(relative_error(got.o[b], want.o[b]), 2.5e-3)
              << "sequence " << b << ", from " << from << ", group " << group << ", dim " << dim;
        }
      }
    }
  }
}

// Short caches of few key heads have a kernel of their own, which rounds nothing but sums.
TEST_P(GpuDecode, ShortCaches) {
  if (implementation() != "sm90") GTEST_SKIP() << "only the Hopper kernels have it";
  for (const int64_t group : {1, 2, 3, 4}) {
    for (const int64_t dim : {64, 128}) {
      for (const RidgeShape ridge : {RidgeShape::token, RidgeShape::dimension}) {
        CacheSpec spec = decoding(dim, {{1, 450}, {1, 1}, {1, 65, 20}, {1, 200}}, group == 1 ? 0 : group == 2 ? 16 : 1);
        spec.heads_q = 2 * group;
        spec.ridge = ridge;
        spec.options.window_left = group == 3 ? 300 : -1;
        expect_right_as_it_is(spec, data::Kind::randn, 0.1, 1e-4);
        if (HasFailure() || IsSkipped()) return;
      }
    }
  }
  for (const data::Kind kind : data::kinds) {
    for (const double ridge : {1.0, 0.1, 0.01}) {
      SCOPED_TRACE(data::name(kind));
      CacheSpec spec = decoding(kind == data::Kind::self ? 128 : 64, {{1, 100}, {1, 350}});
      spec.heads_q = 6;
      expect_right_as_it_is(spec, kind, ridge, 1e-4);
    }
  }
  CacheSpec odd = decoding(40, {{1, 200}, {1, 130}});
  odd.value_dim = 24;
  odd.layout = Layout::scattered;  // not for copies of sixteen bytes
  expect_right_as_it_is(odd, data::Kind::randn, 0.1, 1e-4);
}

// Which kernels there are to choose from follows from the host's bound of the lengths, which one works from the lengths.
TEST_P(GpuDecode, TheBoundOfShortCachesChangesNoBit) {
  for (const int64_t dim : {64, 128}) {
    for (const int64_t group : {1, 4}) {
      CacheSpec spec = decoding(dim, {{1, 300}, {1, 500}}, 16);
      spec.heads_q = 2 * group;
      if (!takes_cache(implementation(), spec)) GTEST_SKIP() << lla_last_error();
      const std::vector<Inputs> inputs = make_cache_inputs(spec, data::Kind::queries6, 0.1, 3);
      const CacheForward want = run_cache(spec, inputs, implementation());
      ASSERT_EQ(want.status, LLA_OK) << want.message;
      spec.capacity = 8192;
      const CacheForward got = run_cache(spec, inputs, implementation());
      ASSERT_EQ(got.status, LLA_OK) << got.message;
      EXPECT_EQ(got.o, want.o) << spec.text();
      EXPECT_EQ(got.row_status, want.row_status);
    }
  }
}

// A long cache beside short ones: none of them is that kernel's.
TEST_P(GpuDecode, ALongCacheBesideShortOnes) {
  for (const int64_t group : {1, 4}) {
    CacheSpec spec = decoding(64, {{1, 300}, {1, 3300}, {1, 64}});
    spec.heads_q = 2 * group;
    expect_right(spec);
  }
}

TEST_P(GpuDecode, SameBitsAgain) {
  const CacheSpec spec = decoding(128, {{1, 5000}, {1, 700}}, 16);
  if (!takes_cache(implementation(), spec)) GTEST_SKIP() << lla_last_error();
  const std::vector<Inputs> inputs = make_cache_inputs(spec, data::Kind::cluster, 0.1, 5);
  const CacheForward first = run_cache(spec, inputs, implementation());
  for (int i = 0; i < 5; ++i) {
    const CacheForward again = run_cache(spec, inputs, implementation());
    for (size_t b = 0; b < 2; ++b) EXPECT_TRUE(identical(first.o[b], again.o[b]));
  }
}

template <int kTimes>
lla_status calls_in_a_row(const lla_forward_args* args) {
  lla_status status = LLA_OK;
  for (int i = 0; i < kTimes && status == LLA_OK; ++i) status = lla_forward(args);
  return status;
}

// Calls one behind the other that keep all multiprocessors and the memory busy, every block with several long units: who
// is first among the warps of a block is another in every run, and shows in the bits where somebody did not wait.
TEST_P(GpuDecode, AFullMachineOfLongCachesRepeatsItself) {
  for (const int64_t dim : {64, 128}) {
    CacheSpec spec = decoding(dim, std::vector<CachedSequence>(reduced() ? 3 : 72, {1, reduced() ? 700 : 5000}));
    spec.order = PageOrder::shared;  // equal sequences: one in fp64 stands for all
    CacheSpec one = spec;
    one.sequences.resize(1);
    const Inputs same = make_cache_inputs(one, data::Kind::randn, 0.1, 5)[0];
    const CacheForward want = cache_oracle(one, {same});
    for (const auto& [page_size, invariant] : {std::pair{0, 0}, {0, 1}, {16, 0}, {1, 1}}) {
      spec.page_size = page_size;
      spec.options.batch_invariant = invariant;
      if (!takes_cache(implementation(), spec)) GTEST_SKIP() << lla_last_error();
      const std::vector<Inputs> all(spec.sequences.size(), same);
      CacheForward first;
      for (int run = 0; run < 3; ++run) {
        const CacheForward got = run_cache(spec, all, implementation(), nullptr, calls_in_a_row<6>);
        ASSERT_EQ(got.status, LLA_OK) << got.message;
        if (run == 0) first = got;
        for (size_t b = 0; b < all.size(); ++b) {
          EXPECT_LE(relative_error(got.o[b], want.o[0]), 2.5e-3) << "sequence " << b << ", dim " << dim;
          EXPECT_TRUE(identical(got.o[b], first.o[b])) << "sequence " << b << ", dim " << dim;
          EXPECT_TRUE(!invariant || identical(got.o[b], first.o[0])) << "sequence " << b << ", dim " << dim;
        }
        if (HasFailure()) return;
      }
    }
  }
}

// Every block with several units that are about as long as its ring, many calls one behind the other: where the keys of a
// unit come to a place whose last keys have not landed yet.
TEST_P(GpuDecode, ShortUnitsRepeatThemselves) {
  const CacheIssue many = reduced() ? calls_in_a_row<3> : calls_in_a_row<60>;
  for (const int64_t dim : {64, 128}) {
    std::vector<CachedSequence> sequences;
    for (int b = 0; b < (reduced() ? 12 : 300); ++b) {
      sequences.push_back({1, std::vector<int64_t>{288, 700, 129, 352, 60, 704, 320, 300, 90, 640}[b % 10]});
    }
    const CacheSpec spec = decoding(dim, sequences);
    if (!takes_cache(implementation(), spec)) GTEST_SKIP() << lla_last_error();
    const std::vector<Inputs> inputs = make_cache_inputs(spec, data::Kind::randn, 0.1, 7);
    const CacheForward want = cache_oracle(spec, inputs);
    CacheForward first;
    for (int run = 0; run < 3; ++run) {
      const CacheForward got = run_cache(spec, inputs, implementation(), nullptr, many);
      ASSERT_EQ(got.status, LLA_OK) << got.message;
      if (run == 0) first = got;
      for (size_t b = 0; b < inputs.size(); ++b) {
        EXPECT_LE(relative_error(got.o[b], want.o[b]), 2.5e-3) << "sequence " << b << ", dim " << dim;
        EXPECT_TRUE(identical(got.o[b], first.o[b])) << "sequence " << b << ", dim " << dim;
      }
      if (HasFailure()) return;
    }
  }
}

// Rows enough that blocks have all of some, one after the other, with ridges of every size side by side: none, hardly any,
// an infinite one.
TEST_P(GpuDecode, RowsThatABlockHasAllOf) {
  const std::array<double, 8> ridges{0.1, 0, INFINITY, 1e-6, 0.01, 1, 0.1, 0.01};
  const size_t distinct = ridges.size();  // one in fp64 stands for all that are like it
  std::vector<std::pair<int64_t, int64_t>> shapes{{64, 40}, {96, 300}, {128, 40}, {128, 1100}};
  if (!reduced()) shapes.insert(shapes.end(), {{64, 1100}, {128, 300}, {128, 2500}});
  for (const auto& [dim, keys] : shapes) {
    CacheSpec few = decoding(dim, std::vector<CachedSequence>(distinct, {1, keys}));
    if (keys == 300) few.dtype = DType::f16, few.page_size = 16;
    if (dim == 96) few.value_dim = 72;
    if (!takes_cache(implementation(), few)) GTEST_SKIP() << lla_last_error();
    std::vector<Inputs> inputs = make_cache_inputs(few, data::Kind::randn, 0.1, 20261120);
    for (size_t b = 0; b < distinct; ++b) std::ranges::fill(inputs[b].ridge, ridges[b]);
    const CacheForward want = cache_oracle(few, inputs);
    CacheSpec spec = few;
    while (spec.sequences.size() < static_cast<size_t>(multiprocessors())) {
      inputs.push_back(inputs[spec.sequences.size() % distinct]);
      spec.sequences.push_back(few.sequences[0]);
    }
    const CacheForward got = run_cache(spec, inputs, implementation());
    ASSERT_EQ(got.status, LLA_OK) << got.message;
    for (size_t b = 0; b < inputs.size(); ++b) {
      SCOPED_TRACE(core::cat("sequence ", b, ", ridge ", ridges[b % distinct], ", ", spec.text()));
      const bool singular = ridges[b % distinct] < 0.01 && keys < 2 * dim;
      const bool solved = std::ranges::count(got.row_status[b], LLA_ROW_OK) == spec.heads_q;
      EXPECT_TRUE(solved || singular);
      if (solved) {
        EXPECT_LE(relative_error(got.o[b], want.o[b % distinct]), singular ? 1e-2 : 2.5e-3);
      }
    }
    const CacheForward again = run_cache(spec, inputs, implementation(), nullptr, calls_in_a_row<3>);
    for (size_t b = 0; b < inputs.size(); ++b) EXPECT_TRUE(identical(again.o[b], got.o[b])) << "sequence " << b;
    if (HasFailure()) return;
  }
}

// So many rows that a block's part of one is thousands of keys: sums on the tensor cores lose digits the longer they are.
TEST_P(GpuDecode, LongPartsOfEveryKind) {
  if (implementation() != "sm90") GTEST_SKIP() << "only the Hopper kernels split rows by their number";
  std::vector<data::Kind> kinds(std::begin(data::kinds), std::end(data::kinds));
  kinds.insert(kinds.end(), {data::Kind::queries6, data::Kind::mean30, data::Kind::qk_norm});
  for (const data::Kind kind : kinds) {
    for (const int64_t dim : {64, 128}) {
      for (const double ridge : {1.0, 0.1, 0.01}) {
        CacheSpec spec = decoding(dim, std::vector<CachedSequence>(72, {1, 6000}), 128);
        spec.order = PageOrder::shared;  // equal sequences: one in fp64 stands for all
        if (!takes_cache(implementation(), spec)) GTEST_SKIP() << lla_last_error();
        CacheSpec one = spec;
        one.sequences.resize(1);
        const Inputs same = make_cache_inputs(one, kind, ridge, 11)[0];
        const CacheForward want = cache_oracle(one, {same});
        const CacheForward got = run_cache(spec, std::vector<Inputs>(72, same), implementation());
        ASSERT_EQ(got.status, LLA_OK) << got.message;
        double worst = 0;
        for (const auto& o : got.o) worst = std::max(worst, relative_error(o, want.o[0]));
        EXPECT_LE(worst, 2.5e-3) << data::name(kind) << ", ridge " << ridge << ", dim " << dim;
      }
    }
  }
}

// options.batch_invariant: a sequence alone, in another batch, in another order has the same bits. The batches have rows
// for blocks that solve and rows for clusters, and units that begin in the middle of a block's work.
TEST_P(GpuDecode, BatchInvariance) {
  for (const int64_t dim : {64, 128}) {
    for (const RidgeShape ridge : {RidgeShape::token, RidgeShape::none}) {
      CacheSpec all = decoding(dim, {{1, 9000}, {2, 700}, {1, 2100}, {1, 1}, {1, 129}, {1, 1000}, {3, 3000}}, 16);
      while (all.sequences.size() < 40) all.sequences.push_back({1, 100 + 37 * int64_t(all.sequences.size())});
      all.packed = true;
      all.heads_q = 4;
      all.ridge = ridge;
      all.options.batch_invariant = 1;
      if (!takes_cache(implementation(), all)) GTEST_SKIP() << lla_last_error();
      const std::vector<Inputs> inputs = make_cache_inputs(all, data::Kind::randn, 0.1, 5);
      const CacheForward together = run_cache(all, inputs, implementation());
      ASSERT_EQ(together.status, LLA_OK) << together.message;
      CacheSpec reversed = all;
      std::reverse(reversed.sequences.begin(), reversed.sequences.end());
      const CacheForward backwards =
          run_cache(reversed, std::vector<Inputs>(inputs.rbegin(), inputs.rend()), implementation());
      for (size_t b = 0; b < all.sequences.size(); ++b) {
        EXPECT_TRUE(identical(together.o[b], backwards.o[all.sequences.size() - 1 - b])) << "sequence " << b;
        if (b > 7) continue;
        CacheSpec one = all;
        one.sequences = {all.sequences[b]};
        const CacheForward alone = run_cache(one, {inputs[b]}, implementation());
        ASSERT_EQ(alone.status, LLA_OK) << alone.message;
        EXPECT_TRUE(identical(alone.o[0], together.o[b])) << "sequence " << b << ", dim " << dim;
        if (all.sequences[b].keys > 2500) continue;  // fp64 takes its time
        EXPECT_LE(relative_error(alone.o[0], cache_oracle(one, {inputs[b]}).o[0]), 2.5e-3) << "sequence " << b;
      }
    }
  }
}

}  // namespace
}  // namespace lla::test
