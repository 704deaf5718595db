// The language model's text: the .py files of torch and of what comes with it, and of Python's standard library to test
// on. Free of torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/results.hpp"

namespace lla::trained {

struct CorpusOptions {
  experiments::fs::path site_packages;     // holds the packages
  experiments::fs::path standard_library;  // .../lib/python3.x
  std::vector<std::string> packages = {"torch", "sympy", "mpmath", "networkx"};
  int64_t test_bytes = 2'000'000;
  double most_shared = 0.2;  // of a held-out file's 64-byte windows with training; above, the file is dropped
};

// A part is its files one after the other, each followed by a newline.
struct Corpus {
  std::vector<uint8_t> training, validation, test;
  std::vector<std::string> test_names;
  std::vector<int64_t> test_lengths;  // of the files, with their newline
  experiments::Json manifest;         // files, bytes and SHA-256 of every part, what was dropped
};

// A directory goes to validation where the CRC-32 of "package/directory" is a multiple of 50: neighbours stay together.
// Of equal files the first stays, in the order training, validation, test. Test files are taken by their SHA-256,
// smallest first, without tests and installed packages.
Corpus read_corpus(const CorpusOptions& options);

// Which share of the 64-byte windows of each text occurs in `training`; 1 for a text without a window.
std::vector<double> shared_windows(const std::vector<std::string_view>& texts,
                                   const std::vector<std::string_view>& training);

}  // namespace lla::trained
