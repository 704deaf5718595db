// Runs the decoding sequences of a call: waves of units, each step of a wave shared by all threads.
#include "cpu/decode.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>

#include "cpu/decode_run.hpp"
#include "cpu/thread_pool.hpp"
#include "cpu/work.hpp"

namespace lla::cpu {
namespace {

constexpr int64_t kDecodeBytes = int64_t{64} << 20;  // units of a wave take no more, unless one alone does

// Keys the rows of a unit may see together.
int64_t most_keys(const core::Problem& p) {
  if (p.mask.left < 0 || p.mask.right < 0) return p.seqlen_k;
  return std::min(p.seqlen_k, std::min(p.mask.left, p.seqlen_k) + std::min(p.mask.right, p.seqlen_k) +
                                  std::min(kMostDecodedRows, p.seqlen_q));
}

// Keys of a span: cut by the unit's own keys, so that nothing else decides about its sums.
int64_t span_keys(int64_t keys) {
  return kDecodeSum * std::max<int64_t>(1, (keys + kDecodeSum * kDecodeSpans - 1) / (kDecodeSum * kDecodeSpans));
}
int64_t span_count(int64_t keys) { return (keys + span_keys(keys) - 1) / span_keys(keys); }

template <class T>
void take_unit(Arena& arena, const core::Problem& p, DecodeUnit<T>& unit) {
  const DecodeSizes size = decode_steps<T>().sizes(p.dim, p.value_dim);
  const int64_t rows = std::min(kDecodeRows, p.seqlen_q * p.group()), keys = most_keys(p);
  const int64_t spans = span_count(keys);
  const bool solved = !p.given_x();
  unit.shift = arena.take<T>(size.key_stride);
  for (int64_t i = 0; i < rows; ++i) {
    DecodeRow<T>& row = unit.row[i];
    for (T** array : {&row.query, &row.vector}) *array = arena.take<T>(size.key_stride);
    row.logits = solved ? arena.take<T>(round_up(keys, kDecodeTile)) : nullptr;
    for (double** array :
         {&row.query_as_given, &row.ridge, &row.rhs, &row.mean_k, &row.solution, &row.diagonal, &row.inverse}) {
      *array = arena.take<double>(p.dim);
    }
    row.matrix = solved ? arena.take<double>(size.entries) : nullptr;
    row.factor = solved ? arena.take<double>(p.dim * p.dim) : nullptr;
  }
  SpanSums* const all = arena.take<SpanSums>(spans * kDecodeRows);
  const bool real = all != nullptr;
  unit.sums = all;
  for (int64_t span = 0; span < spans; ++span) {
    for (int64_t i = 0; i < rows; ++i) {
      SpanSums sums;
      for (double** array : {&sums.keys, &sums.image}) *array = solved ? arena.take<double>(size.key_stride) : nullptr;
      for (double** array : {&sums.values, &sums.steered}) *array = arena.take<double>(size.value_stride);
      sums.matrix = solved ? arena.take<double>(size.entries) : nullptr;
      if (real) new (all + span * kDecodeRows + i) SpanSums(sums);
    }
  }
}

template <class T>
void take_worker(Arena& arena, const core::Problem& p, DecodeWorker<T>& worker) {
  const DecodeSizes size = decode_steps<T>().sizes(p.dim, p.value_dim);
  for (T** array : {&worker.keys, &worker.scaled}) *array = arena.take<T>(kDecodeTile * size.key_stride);
  worker.values = arena.take<T>(kDecodeTile * size.value_stride);
  worker.coefficients = arena.take<T>(kDecodeTile * 2 * kDecodeRows);
  worker.dots = arena.take<T>(kDecodeTile * 2 * kDecodeRows);
  worker.triangle = p.given_x() ? nullptr : arena.take<T>(kDecodeRows * size.entries);
}

int64_t most_units(const core::Problem& p) {
  return p.batch * p.heads_kv * ((std::min(p.seqlen_q * p.group(), kMostDecodedRows) + kDecodeRows - 1) / kDecodeRows);
}

template <class T>
int64_t units_at_once(const core::Problem& p) {
  Arena one(nullptr);
  DecodeUnit<T> unit;
  take_unit(one, p, unit);
  return std::clamp<int64_t>(kDecodeBytes / static_cast<int64_t>(one.used()), 1, std::max<int64_t>(1, most_units(p)));
}

template <class T>
struct DecodeMemory {
  DecodeUnit<T>* units;
  DecodeWorker<T>* workers;

  void take(Arena& arena, const core::Problem& p, int worker_count, int64_t unit_count) {
    units = arena.take<DecodeUnit<T>>(unit_count);
    workers = arena.take<DecodeWorker<T>>(worker_count);
    for (int i = 0; i < worker_count; ++i) {
      DecodeWorker<T> worker;
      take_worker(arena, p, worker);
      if (workers) new (workers + i) DecodeWorker<T>(worker);
    }
    for (int64_t i = 0; i < unit_count; ++i) {
      DecodeUnit<T> unit{};
      take_unit(arena, p, unit);
      if (units) new (units + i) DecodeUnit<T>(unit);
    }
  }
};

// Units of a call in the order of sequences, heads and rows.
class Jobs {
 public:
  explicit Jobs(const core::ForwardCall& call) : call_(call) {}
  bool next(DecodeJob& job) {
    const core::Problem& p = call_.problem;
    for (; batch_ < p.batch; ++batch_, head_ = 0) {
      const core::Sequence s = core::sequence(call_, batch_);
      const int64_t rows = s.length_q * p.group();
      if (!decodes(p, s) || rows == 0) continue;
      for (; head_ < p.heads_kv; ++head_, row_ = 0) {
        if (row_ >= rows) continue;
        job = {batch_, head_, row_, std::min(kDecodeRows, rows - row_)};
        row_ += kDecodeRows;
        return true;
      }
    }
    return false;
  }

 private:
  const core::ForwardCall& call_;
  int64_t batch_ = 0, head_ = 0, row_ = 0;
};

core::KeyRange keys_of(const core::Problem& p, const core::Sequence& s, const DecodeJob& job) {
  return core::visible_keys(p.mask, s, job.first_row / p.group(), (job.first_row + job.rows - 1) / p.group());
}

// A row's query, ridge or x as the caller gave them. Returns false where one makes the row NaN.
template <class T>
bool read_inputs(const core::ForwardCall& call, const DecodeUnit<T>& unit, DecodeRow<T>& row) {
  const core::Problem& p = call.problem;
  const int64_t stride = decode_steps<T>().sizes(p.dim, p.value_dim).key_stride;
  const auto at = [&](const core::Operand& t) { return row_offset(t, unit.sequence.batch, row.position, row.head); };
  std::fill_n(row.query, stride, T{0});
  std::fill_n(row.vector, stride, T{0});
  T query[kMaxChannels];
  if (read_row(call.q, at(call.q), p.dim, query) >= key_limit<T>(p)) return false;
  const double scale = p.scale * 0.5 * 1.4426950408889634074;
  for (int64_t c = 0; c < p.dim; ++c) {
    row.query_as_given[c] = static_cast<double>(query[c]);
    row.query[c] = static_cast<T>(row.query_as_given[c] * scale);
  }
  if (p.given_x()) return read_row(call.x, at(call.x), p.dim, row.vector) < infinity_bits<T>();
  const int64_t count = p.ridge == core::RidgeShape::dimension ? p.dim : 1;
  read_row(call.ridge, at(call.ridge), count, row.ridge);
  std::fill_n(row.ridge + count, p.dim - count, row.ridge[0]);
  return std::all_of(row.ridge, row.ridge + p.dim, [](double ridge) { return ridge >= 0; });
}

// A row's information, and its output where there is one; else it is NaN.
template <class T>
void write_result(const core::ForwardCall& call, const DecodeUnit<T>& unit, DecodeRow<T>& row, const double* output) {
  const core::Problem& p = call.problem;
  double values[kMaxChannels] = {};
  if (row.bad) {
    std::fill_n(values, p.value_dim, std::numeric_limits<double>::quiet_NaN());
    row.status = LLA_ROW_NAN;
  } else {
    std::copy_n(output, p.value_dim, values);
    const double largest = core::largest_finite(call.o.dtype);
    if (!std::all_of(values, values + p.value_dim, [&](double x) { return std::abs(x) <= largest; })) {
      row.status = LLA_ROW_BREAKDOWN;
    }
  }
  write_row(call.o, row_offset(call.o, unit.sequence.batch, row.position, row.head), p.value_dim, values);
  if (call.info.iterations) call.info.iterations[row.index] = -1;
  if (call.info.residual) call.info.residual[row.index] = -1.0f;
  if (call.info.status) call.info.status[row.index] = row.status;
}

// A row that sees one key has that key's value, to the bit. Its matrix is the ridge alone.
template <class T>
void write_only_value(const core::ForwardCall& call, const DecodeUnit<T>& unit, DecodeRow<T>& row) {
  const core::Problem& p = call.problem;
  T key[kMaxChannels];
  double value[kMaxChannels];
  const auto at = [&](const core::Operand& t) {
    return key_offset(call.cache, t, unit.sequence, unit.kv_head, row.begin);
  };
  row.bad |= read_row(call.k, at(call.k), p.dim, key) >= key_limit<T>(p);
  row.bad |= read_row(call.v, at(call.v), p.value_dim, value) >= infinity_bits<double>();
  for (int64_t c = 0; c < p.dim && !p.given_x(); ++c) {
    if (row.ridge[c] == 0 && row.query_as_given[c] != static_cast<double>(key[c])) row.status = LLA_ROW_BREAKDOWN;
  }
  write_result(call, unit, row, value);
}

// Sets a unit up. Rows that need no sums are written at once.
template <class T>
void prepare(const core::ForwardCall& call, const DecodeJob& job, DecodeUnit<T>& unit) {
  const core::Problem& p = call.problem;
  unit.call = &call;
  unit.sequence = core::sequence(call, job.batch);
  unit.kv_head = job.kv_head;
  unit.first_row = job.first_row;
  unit.rows = job.rows;
  const core::KeyRange seen = keys_of(p, unit.sequence, job);
  unit.begin = unit.base = seen.begin;
  unit.end = seen.end;
  unit.span_keys = span_keys(seen.end - seen.begin);
  unit.spans = (seen.end - seen.begin + unit.span_keys - 1) / unit.span_keys;
  std::fill_n(unit.shift, decode_steps<T>().sizes(p.dim, p.value_dim).key_stride, T{0});
  unit.shifted = find_shift(call.k, call.cache, unit.sequence, core::visible_keys(p.mask, unit.sequence), unit.kv_head,
                            p.dim, unit.shift);
  bool any = false;
  for (int64_t i = 0; i < unit.rows; ++i) {
    DecodeRow<T>& row = unit.row[i];
    const int64_t query = (job.first_row + i) / p.group();
    const core::KeyRange keys = core::visible_keys(p.mask, unit.sequence, query, query);
    row.begin = keys.begin;
    row.end = keys.end;
    row.position = unit.sequence.start_q + query;
    row.head = job.kv_head * p.group() + (job.first_row + i) % p.group();
    row.index = core::row_index(p, unit.sequence, row.head, query);
    row.status = LLA_ROW_OK;
    row.bad = false;
    row.refinements = 0;
    row.state = DecodeState::idle;
    const double zeros[kMaxChannels] = {};
    if (keys.begin == keys.end) {  // nothing to attend to: 0 whatever else the row holds
      write_result(call, unit, row, zeros);
    } else if (!read_inputs(call, unit, row)) {
      row.bad = true;
      write_result(call, unit, row, nullptr);
    } else if (keys.end - keys.begin == 1) {
      write_only_value(call, unit, row);
    } else {
      row.state = DecodeState::solving;
      any = true;
    }
  }
  if (!any) unit.spans = 0;
}

// Reads what the rows' outputs are and writes them. Returns whether a row is still solving.
template <class T>
bool finish(const core::ForwardCall& call, DecodeUnit<T>& unit) {
  bool solving = false;
  for (int64_t i = 0; i < unit.rows; ++i) {
    DecodeRow<T>& row = unit.row[i];
    double output[kMaxChannels];
    if (row.state == DecodeState::solving) {
      if (decode_steps<T>().output(unit, i, output)) {
        write_result(call, unit, row, output);
        continue;
      }
      if (row.state == DecodeState::idle) write_result(call, unit, row, nullptr);
    }
    solving |= row.state == DecodeState::solving;
  }
  return solving;
}

// Runs `count` jobs that fit a wave. Rows that failed are left to the caller in their units' states.
template <class T>
void run_wave(const core::ForwardCall& call, const DecodeJob* jobs, int64_t count, const DecodeMemory<T>& memory,
              int workers) {
  const core::Problem& p = call.problem;
  parallel_for(count, workers, [&](int64_t i, int) { prepare(call, jobs[i], memory.units[i]); });
  int64_t spans = 0;
  for (int64_t i = 0; i < count; ++i) spans = std::max(spans, memory.units[i].spans);
  const auto for_spans = [&](auto&& step) {
    parallel_for(count * spans, workers, [&](int64_t item, int worker) {
      DecodeUnit<T>& unit = memory.units[item % count];
      if (item / count < unit.spans) step(unit, item / count, memory.workers[worker]);
    });
  };
  const DecodeSteps<T> steps = decode_steps<T>();
  for_spans(steps.statistics);
  bool solving = spans > 0;
  if (!p.given_x()) {
    parallel_for(count * kDecodeRows * kDecodePieces, workers, [&](int64_t item, int) {
      DecodeUnit<T>& unit = memory.units[item / (kDecodeRows * kDecodePieces)];
      const int64_t row = item / kDecodePieces % kDecodeRows;
      if (row < unit.rows && unit.row[row].state == DecodeState::solving) steps.merge(unit, row, item % kDecodePieces);
    });
    parallel_for(count * kDecodeRows, workers, [&](int64_t item, int) {
      DecodeUnit<T>& unit = memory.units[item / kDecodeRows];
      const int64_t i = item % kDecodeRows;
      if (i >= unit.rows || unit.row[i].state != DecodeState::solving) return;
      steps.solve(unit, i);
      if (unit.row[i].state == DecodeState::idle) write_result(call, unit, unit.row[i], nullptr);
    });
  }
  while (solving) {
    if (!p.given_x()) for_spans(steps.apply);
    solving = false;
    for (int64_t i = 0; i < count; ++i) solving |= finish(call, memory.units[i]);
  }
}

void count_work(const core::Problem& p, const core::Sequence& s, const DecodeJob& job) {
  Work work;
  for (int64_t r = job.first_row; r < job.first_row + job.rows; ++r) {
    const core::KeyRange keys = core::visible_keys(p.mask, s, r / p.group(), r / p.group());
    const auto pairs = static_cast<uint64_t>(keys.end - keys.begin);
    const auto channels = static_cast<uint64_t>((p.given_x() ? 2 : 4) * p.dim + 2 * p.value_dim);
    work.product_flops += 2 * pairs * channels;
    if (p.given_x()) continue;
    work.direct_flops += pairs * static_cast<uint64_t>(p.dim * (p.dim + 1));
    ++work.direct_rows;
  }
  add_work(work);
}

// The workspace: lists of jobs, and behind them the memory of one wave after the other, in float or in double. What a
// wave in float leaves over for one in double is a list of rows.
struct DecodeLayout {
  int64_t wave32, wave64;  // units
  DecodeJob *jobs, *late;
  Arena rest;

  DecodeLayout(void* base, const core::Problem& p) : rest(base) {
    wave64 = units_at_once<double>(p);
    wave32 = p.dtype == DType::f64 ? 0 : units_at_once<float>(p);
    jobs = rest.take<DecodeJob>(std::max(wave32, wave64));
    late = rest.take<DecodeJob>(wave32 * kDecodeRows);
  }
  template <class T>
  size_t place(const core::Problem& p, int workers, DecodeMemory<T>& memory) const {
    Arena arena = rest;
    memory.take(arena, p, workers, sizeof(T) == 4 ? wave32 : wave64);
    return arena.used();
  }
};

// Rows of few keys are summed in double at once: float is at its worst there, and gains little.
bool in_float(const core::Problem& p, const core::Sequence& s, const DecodeJob& job) {
  const core::KeyRange keys = keys_of(p, s, job);
  return p.given_x() || keys.end - keys.begin > 2 * p.dim;
}

}  // namespace

bool may_decode(const core::Problem& p) {
  if (p.operation != core::Operation::forward || (!p.given_x() && p.solver == Solver::cg)) return false;
  if (p.cache) return true;
  // A block of 32 lanes costs some 30 products of 2 D operations a lane and key, a row that decodes D (D + 12) a key.
  const int64_t rows = p.seqlen_q * p.group();
  return !p.packed && p.seqlen_k >= kFewestDecodedKeys && rows <= kMostDecodedRows &&
         (p.given_x() || rows * (p.dim + 12) <= 2048);
}
bool only_decodes(const core::Problem& p) { return may_decode(p) && p.seqlen_q * p.group() <= kMostDecodedRows; }
bool decodes(const core::Problem& p, const core::Sequence& s) {
  return may_decode(p) && s.length_q * p.group() <= kMostDecodedRows;
}

size_t decode_workspace(const core::Problem& p, int workers) {
  const DecodeLayout layout(nullptr, p);
  DecodeMemory<float> memory32;
  DecodeMemory<double> memory64;
  const size_t in_double = layout.place(p, workers, memory64);
  return p.dtype == DType::f64 ? in_double : std::max(in_double, layout.place(p, workers, memory32));
}

void decode(const core::ForwardCall& call, int workers) {
  const core::Problem& p = call.problem;
  const DecodeLayout layout(call.workspace, p);
  const auto run_in_double = [&](const DecodeJob* jobs, int64_t count) {
    for (int64_t at = 0; at < count; at += layout.wave64) {
      DecodeMemory<double> memory;
      layout.place(p, workers, memory);
      run_wave(call, jobs + at, std::min(layout.wave64, count - at), memory, workers);
    }
  };
  Jobs all(call);
  DecodeJob job;
  for (bool more = all.next(job); more;) {
    int64_t now = 0, late = 0;
    const int64_t wave = p.dtype == DType::f64 ? layout.wave64 : layout.wave32;
    for (; more && now + late < wave; more = all.next(job)) {
      const core::Sequence s = core::sequence(call, job.batch);
      count_work(p, s, job);
      if (p.dtype == DType::f64 || in_float(p, s, job)) {
        layout.jobs[now++] = job;
      } else {
        layout.late[late++] = job;
      }
    }
    if (p.dtype == DType::f64) {
      run_in_double(layout.jobs, now);
      continue;
    }
    DecodeMemory<float> memory;
    layout.place(p, workers, memory);
    run_wave(call, layout.jobs, now, memory, workers);
    for (int64_t i = 0; i < now; ++i) {
      for (int64_t r = 0; r < memory.units[i].rows; ++r) {
        if (memory.units[i].row[r].state != DecodeState::failed) continue;
        layout.late[late++] = {layout.jobs[i].batch, layout.jobs[i].kv_head, layout.jobs[i].first_row + r, 1};
      }
    }
    run_in_double(layout.late, late);
  }
}

}  // namespace lla::cpu
