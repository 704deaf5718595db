// `lla bench`: options, the list of devices, the table and the file.
#include "bench.hpp"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <ctime>
#include <limits>
#include <map>
#include <memory>
#include <stdexcept>

#include <fmt/core.h>

#include "commands.hpp"
#include "core/text.hpp"
#include "files.hpp"
#include "numbers.hpp"
#include "progress.hpp"

namespace lla::app {

const char* name(BenchWhat what) {
  switch (what) {
    case BenchWhat::forward: return "forward";
    case BenchWhat::backward: return "backward";
    case BenchWhat::cg: return "cg";
    case BenchWhat::decode: return "decode";
  }
  return "";
}

std::vector<int64_t> lengths_of(const BenchOptions& o) {
  return o.lengths.empty() ? std::vector<int64_t>{1024, 4096} : o.lengths;
}

std::vector<int64_t> dims_of(const BenchOptions& o) { return o.dims.empty() ? std::vector<int64_t>{64, 128} : o.dims; }

bench::Case case_of(const BenchOptions& o, DType default_dtype, int64_t dim, int64_t length) {
  bench::Case c;
  c.what = o.what == BenchWhat::forward    ? bench::What::forward
           : o.what == BenchWhat::backward ? bench::What::backward
                                           : bench::What::cg;
  c.dtype = o.dtype == DType::none ? default_dtype : o.dtype;
  c.batch = o.batch;
  c.heads = o.heads;
  c.length = length;
  c.dim = dim;
  c.kind = o.kind;
  c.trained = o.trained;
  c.ridge = o.ridge;
  c.causal = o.causal;
  c.tolerance = o.tolerance;
  c.solver = o.solver;
  if (o.seconds > 0) c.seconds = o.seconds;
  return c;
}

namespace {

const BenchDevice* const kDevices[] = {
    &cpu_bench,
#if LLA_HAVE_CUDA
    &cuda_bench,
#endif
};

const std::map<std::string, DType> kDtypes = {
    {"f32", DType::f32}, {"f64", DType::f64}, {"bf16", DType::bf16}, {"f16", DType::f16}};
const std::map<std::string, Solver> kSolvers = {
    {"auto", Solver::automatic}, {"cg", Solver::cg}, {"direct", Solver::direct}};

const std::map<std::string, Weights> kWeights = {
    {"auto", Weights::automatic}, {"recompute", Weights::recompute}, {"cached", Weights::cached}};

struct Command {
  BenchOptions options;
  std::string device = "cpu", dtype, kind = "randn", data, solver = "auto", weights = "auto", json;
  bool full = false;
};

const BenchDevice& find_device(const std::string& wanted) {
  std::string names;
  for (const BenchDevice* device : kDevices) {
    if (wanted == device->name) return *device;
    names += (names.empty() ? "" : ", ") + std::string(device->name);
  }
  throw CLI::ValidationError(
      "--device", fmt::format("there is no measuring code for \"{}\" in this build; it has {}", wanted, names));
}

void print(const BenchReport& report) {
  std::vector<size_t> widths;
  for (size_t i = 0; i < report.columns.size(); ++i) {
    size_t width = std::max(report.columns[i].title.size(), report.columns[i].unit.size());
    for (const auto& row : report.rows) width = std::max(width, row[i].size());
    widths.push_back(width);
  }
  const auto line = [&](const std::function<std::string(size_t)>& cell) {
    std::string text;
    for (size_t i = 0; i < widths.size(); ++i) text += fmt::format("{}{:>{}}", i ? "  " : "", cell(i), widths[i]);
    fmt::print("{}\n", text);
  };
  line([&](size_t i) { return report.columns[i].title; });
  line([&](size_t i) { return report.columns[i].unit; });
  for (const auto& row : report.rows) line([&](size_t i) { return row[i]; });
  for (const std::string& note : report.notes) fmt::print("{}\n", note);
}

// As docs/benchmarks holds it.
void print_markdown(const BenchReport& report) {
  std::string head = "|", rule = "|";
  for (const auto& column : report.columns) {
    head += fmt::format(" {}{} |", column.title, column.unit.empty() ? "" : " " + column.unit);
    rule += "---|";
  }
  fmt::print("\n{}\n{}\n", head, rule);
  for (const auto& row : report.rows) {
    std::string text = "|";
    for (const std::string& cell : row) text += fmt::format(" {} |", cell);
    fmt::print("{}\n", text);
  }
  fmt::print("\n");
  for (const std::string& note : report.notes) fmt::print("{}\n", note);
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  char text[16];
  std::strftime(text, sizeof text, "%Y-%m-%d", std::gmtime(&now));
  return text;
}

void write_json(const Command& command, const BenchReport& report) {
  const BenchOptions& o = command.options;
  const nlohmann::ordered_json all = {
      {"version", lla_version()},   {"date", today()},           {"machine", lla_machine_description()},
      {"bench", name(o.what)},      {"device", command.device},  {"kind", command.kind},
      {"ridge", o.ridge},           {"causal", o.causal},        {"tolerance", o.tolerance},
      {"solver", command.solver},   {"results", report.records}, {"notes", report.notes},
      {"failures", report.failures}};
  write_file(command.json, all.dump(2) + "\n");
}

// Trained heads decide about shapes and ridges.
void take_heads(Command& command) {
  BenchOptions& o = command.options;
  const std::vector<data::TrainedHead> all = data::read_heads(command.data);
  o.trained = std::make_shared<const std::vector<data::TrainedHead>>(data::longest_heads(all));
  if (o.trained->size() < all.size()) {
    fmt::print(stderr, "{}: {} of {} heads, those of {} rows\n", command.data, o.trained->size(), all.size(),
               o.trained->front().length);
  }
  o.lengths = {o.trained->front().length};
  o.dims = {o.trained->front().dim};
  o.heads = static_cast<int64_t>(o.trained->size());
  o.ridge = std::numeric_limits<double>::infinity();
  for (const data::TrainedHead& head : *o.trained) o.ridge = std::min(o.ridge, std::ranges::min(head.ridge));
  command.kind = command.data;
}

void run(Command& command) {
  BenchOptions& o = command.options;
  if (!command.dtype.empty()) o.dtype = kDtypes.at(command.dtype);
  o.solver = kSolvers.at(command.solver);
  o.weights = kWeights.at(command.weights);
  o.kind = *data::find_kind(command.kind);
  o.causal = !command.full;
  if (!command.data.empty()) take_heads(command);
  const BenchDevice& device = find_device(command.device);
  if (const std::string reason = device.refuse(o); !reason.empty()) {
    throw CLI::ValidationError(fmt::format("bench {}", name(o.what)), reason);
  }
  if (!command.json.empty()) require_writable(command.json);
  BenchReport report;
  {
    ProgressBar bar(fmt::format("bench {}", name(o.what)));
    device.run(o, report, [&](double done) { bar.reach(done); });
  }
  const std::string heads = o.table ? "" : fmt::format(", batch {}, heads {}", o.batch, o.heads);
  fmt::print("lla {} {} on {}: {}, {}, ridge {}{}, tolerance {}{}\n{}\n", lla_version(), name(o.what), device.name,
             command.kind, o.causal ? "causal" : "full", o.trained ? "their own, from " : "", o.ridge, o.tolerance,
             heads, lla_machine_description());
  o.table ? print_markdown(report) : print(report);
  if (!command.json.empty()) write_json(command, report);
  if (!report.failures.empty()) {
    std::string text = fmt::format("{} cases were not measured:", report.failures.size());
    for (const std::string& failure : report.failures) text += "\n  " + failure;
    throw std::runtime_error(text);
  }
}

void add(CLI::App& bench, BenchWhat what, const char* description) {
  CLI::App* app = bench.add_subcommand(name(what), description);
  auto command = std::make_shared<Command>();
  BenchOptions& o = command->options;
  o.what = what;
  std::vector<std::string> kinds;
  for (data::Kind kind : data::kinds) kinds.emplace_back(data::name(kind));
  // The help texts name the choices; what CLI11 would add to them is noise.
  const auto from_one_to = [](int64_t most) { return whole_number(1, most); };
  const auto one_of = [](const auto& names) { return CLI::IsMember(names).description(""); };
  const auto above_zero = number_above(0);
  app->add_option("--device", command->device, "Where to measure: cpu or cuda")
      ->capture_default_str()
      ->type_name("NAME");
  const bool decode = what == BenchWhat::decode;
  app->add_option("--length", o.lengths,
                  decode ? "Keys of a sequence in the cache; repeatable" : "Sequence length; repeatable")
      ->check(from_one_to(1 << 24))
      ->type_name("N");
  app->add_option("--dim", o.dims, "Head dimension; repeatable")->check(from_one_to(256))->type_name("D");
  app->add_option("--batch", o.batch, "Batch entries")
      ->check(from_one_to(1 << 20))
      ->capture_default_str()
      ->type_name("B");
  app->add_option("--heads", o.heads, decode ? "Heads of keys and values" : "Heads")
      ->check(from_one_to(1 << 16))
      ->capture_default_str()
      ->type_name("H");
  app->add_option("--dtype", command->dtype, "f32, f64, bf16 or f16 (default: f32 on a CPU, bf16 on a GPU)")
      ->check(one_of(kDtypes))
      ->type_name("TYPE");
  if (decode) {
    app->add_option("--group", o.group, "Query heads per key head")
        ->check(from_one_to(256))
        ->capture_default_str()
        ->type_name("G");
    app->add_option("--queries", o.queries, "New queries of a sequence")
        ->check(from_one_to(1 << 16))
        ->capture_default_str()
        ->type_name("Q");
    app->add_option("--page-size", o.page_size, "Pages of so many keys, in any order (default: a contiguous cache)")
        ->check(from_one_to(1 << 20))
        ->type_name("N");
    app->add_flag("--head-major", o.head_major, "A head's keys side by side (default: a key's heads)");
    app->add_flag("--batch-invariant", o.batch_invariant, "With options.batch_invariant");
  } else {
    app->add_option("--kind", command->kind, "Data: randn, aniso, self, cluster, pw or mean")
        ->check(one_of(kinds))
        ->capture_default_str()
        ->type_name("KIND");
    app->add_option("--data", command->data,
                    "Heads of a trained model instead of a kind, with their own shapes and ridges: a folder with "
                    "NAME_q.npy, _k, _v, _ridge and perhaps _g (an .npz file, unzipped), or a case file")
        ->check(CLI::ExistingPath.description(""))
        ->type_name("PATH");
    app->add_flag("--full", command->full, "Every query sees every key (default: causal)");
    app->add_option("--weights", command->weights, "auto, recompute or cached; on a GPU")
        ->check(CLI::IsMember(kWeights))
        ->capture_default_str()
        ->type_name("NAME");
  }
  app->add_option("--ridge", o.ridge, "The ridge of every row")
      ->check(number_from(0))
      ->capture_default_str()
      ->type_name("X");
  app->add_option("--seconds", o.seconds, "Time to spend on repeats of one case (default: 1, with --table 0.1)")
      ->check(above_zero)
      ->type_name("S");
  app->add_option("--threads", o.threads, "CPU threads (default: the library's choice)")
      ->check(from_one_to(4096))
      ->type_name("T");
  app->add_option("--implementation", o.implementation,
                  decode ? "One implementation instead of the library's choice"
                         : "One implementation instead of the library's choice; on a GPU")
      ->type_name("NAME");
  if (what != BenchWhat::cg) {  // whose iterations are counted out: no tolerance, no choice
    app->add_flag("--given-x", o.given_x,
                  decode ? "With x given instead of solved for (Parallax)"
                         : "With x given instead of solved for (Parallax); on a GPU");
    if (!decode)
      app->add_flag("--table", o.table,
                    "Every shape of docs/benchmarks, both kinds of weights and x given, in Markdown; on a GPU");
    app->add_option("--tolerance", o.tolerance, "Of the solver")
        ->check(above_zero)
        ->capture_default_str()
        ->type_name("X");
    app->add_option("--solver", command->solver, "auto, cg or direct")
        ->check(one_of(kSolvers))
        ->capture_default_str()
        ->type_name("NAME");
  }
  app->add_option("--json", command->json, "Also write the results to this file")
      ->check(not_empty())
      ->type_name("FILE");
  app->callback([command, app] {
    for (const char* chosen : {"--length", "--dim", "--heads", "--kind", "--ridge", "--table"}) {
      if (!command->data.empty() && app->get_option_no_throw(chosen) != nullptr && app->count(chosen) > 0) {
        throw CLI::ValidationError("--data", fmt::format("has its own shapes and ridges, {} cannot be given", chosen));
      }
    }
    for (const char* chosen : {"--length", "--dim", "--batch", "--heads", "--weights", "--given-x"}) {
      if (command->options.table && app->get_option_no_throw(chosen) != nullptr && app->count(chosen) > 0) {
        throw CLI::ValidationError("--table",
                                   fmt::format("has its own shapes and weights, {} cannot be given", chosen));
      }
    }
    run(*command);
  });
}

}  // namespace

void add_bench(CLI::App& root, int& /*exit_code*/) {
  CLI::App* bench = root.add_subcommand("bench", "Measure speed: forward, backward, one solver iteration, decode");
  bench->require_subcommand(1);
  add(*bench, BenchWhat::forward, "The whole forward pass");
  add(*bench, BenchWhat::backward, "The whole backward pass");
  add(*bench, BenchWhat::cg, "One iteration of conjugate gradients");
  add(*bench, BenchWhat::decode, "New queries of every sequence over a key-value cache");
}

}  // namespace lla::app
