// The pre-pass: keys and values as fp16, each head scaled by a power of two so that nothing is lost, in the workspace.
//
// Where all keys of a head lie far from zero along an axis, they lose their common part first: k - c, exact in fp16.
// Nothing that is computed depends on c (logits move by a constant per row), but products of the direction with a large
// common mean would round away what the keys differ in.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/tensor/params.hpp"

namespace lla::cuda::tensor {

// One tensor of the call (keys or values) and where its copy goes.
struct PrepassOperand {
  Rows rows;
  int32_t dim;     // its own; the copy is padded with zeros
  uint16_t* copy;  // fp16, [head][position][padded]
  uint8_t* marks;  // Mark per [head][position]
  bool keys;       // keys: their largest norm is wanted, too
};

struct PrepassParams {
  PrepassOperand operand[2];
  Header* header;  // cleared by the pre-pass
  HeadStatistics* heads;
  float* chunk_maxima;  // [head][chunk][operand]
  float* chunk_bounds;  // [head][chunk][least, largest][padded], of keys
  float* shift;         // c, [head][padded]; null: keys stay as they are
  int32_t head_count;   // (batch or 1) * heads_kv
  int32_t heads_kv;
  int32_t positions;   // per head: seqlen_k, packed total_k
  const int32_t* end;  // packed: where the last sequence ends; what lies behind is copied as zeros, unread
  int32_t padded;      // 64 or 128
};

// One kernel where a block takes a whole head, else two: few launches matter to small problems.
Status run_prepass(const PrepassParams& params, cudaStream_t stream);

}  // namespace lla::cuda::tensor
