// The implementation list: who can run a problem, with what plan, and how it is run. One ordered list, reference last.
#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/problem.hpp"
#include "plan/machine.hpp"

namespace lla::core {

struct Implementation;

// Decided once per call, before anything runs; kernels read it, people print it.
struct Plan {
  const Implementation* implementation = nullptr;
  size_t workspace_bytes = 0;
  Solver solver = Solver::cg;
  bool cached_weights = false;
  int block_rows = 0;  // queries per block
  int block_keys = 0;  // keys per tile
  int workers = 0;     // threads, or resident CUDA blocks

  std::string text(const Problem&, const Machine&) const;  // of what it was made for; one line per decision
};

// What else a reader of a plan wants to know: keys and values.
using Notes = std::vector<std::pair<std::string, std::string>>;

struct Implementation {
  const char* name;
  const char* description;
  Device device;
  // Empty when the problem is taken, otherwise the reason it is not.
  std::string (*refuse)(const Problem&, const Machine&);
  Plan (*plan)(const Problem&, const Machine&);
  Notes (*notes)(const Problem&, const Machine&, const Plan&);  // made only for plans that are printed
  Status (*forward)(const ForwardCall&, const Plan&);
  Status (*backward)(const BackwardCall&, const Plan&);
};

// In order of preference. Each backend defines its entries; registry.cpp lists them.
std::span<const Implementation* const> implementations();

// The first implementation (or the one named) that takes the problem.
Status make_plan(const Problem&, const Machine&, const char* wanted, Plan& plan);

// "name: yes" or "name: no, reason", a line each.
std::string explain(const Problem&, const Machine&);

}  // namespace lla::core
