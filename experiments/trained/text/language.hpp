// The language model among the tasks: its data, and what it is asked for once it is trained.
#pragma once

#include <functional>

#include "experiment.hpp"
#include "text/corpus.hpp"
#include "train/stack_trainer.hpp"

namespace lla::trained {

// Reads the corpus named by the config's "corpus" (see corpus_options) once a process; refuses one that is not the
// committed manifest's, unless "any" is true.
void load_corpus(const Json& settings);
const Corpus& corpus();
CorpusOptions corpus_options(const Json& settings);
Json committed_manifest();

Layout language_layout(const Json& task_options);
Sources language_sources(const Stack& stack, const at::Device& device);

// Bits per byte over the test files (windows of the model's length, half of it apart: every byte is predicted once,
// with at least half a window before it where the file has it), by file, by position in the window, and apart where the
// preceding 8 bytes occurred earlier in the window.
std::function<Json(const Model&, const at::Tensor&, at::ScalarType)> language_evaluation(const Stack& stack,
                                                                                         const at::Device& device);

// Nats of every byte of `text` but the first, by windows of `length` half of it apart.
std::vector<float> nats_of(const Model& model, const at::Tensor& master, at::ScalarType compute,
                           const std::vector<uint8_t>& text, int64_t length, const at::Device& device);

}  // namespace lla::trained
