// The part of a call that decodes: which sequences, in what memory, and the run itself.
#pragma once

#include "core/problem.hpp"
#include "plan/implementation.hpp"

namespace lla::cpu {

// Rows of a kv head (queries times group) up to which a sequence decodes. Each row's matrix costs what conjugate
// gradients cost in tens of iterations, but those fill one lane in many and one thread here.
constexpr int64_t kMostDecodedRows = 16;
// The same without a cache, where nothing is saved for a backward pass: dense batches of as many keys at least, and
// rows whose matrices are less work than the lanes they would fill.
constexpr int64_t kFewestDecodedKeys = 1024;

// Whether sequences of the problem may decode at all, and whether none of them does anything else. Without a cache both
// hold for calls that save nothing.
bool may_decode(const core::Problem& p);
bool only_decodes(const core::Problem& p);
// Whether this one does: a matter of its own rows, never of the other sequences.
bool decodes(const core::Problem& p, const core::Sequence& s);

size_t decode_workspace(const core::Problem& p, int workers);
void decode(const core::ForwardCall& call, int workers);

}  // namespace lla::cpu
