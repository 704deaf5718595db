/* Local Linear Attention from C: values that depend linearly on their keys are recovered exactly. */
#include <lla/lla.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { L = 64, D = 8 };

static lla_tensor view(void* data, int64_t length, int64_t dim) {
  lla_tensor t = {.data = data, .dtype = LLA_F32, .ndim = 4};
  const int64_t size[4] = {1, length, 1, dim},
                stride[4] = {length * dim, dim, dim, 1}; /* (batch, length, heads, dim) */
  for (int i = 0; i < 4; ++i) t.size[i] = size[i], t.stride[i] = stride[i];
  return t;
}

int main(void) {
  static float q[L * D], k[L * D], v[L], o[L];
  for (int i = 0; i < L * D; ++i) k[i] = (float)sin(i * i), q[i] = (float)cos(3.0 * i);
  for (int i = 0; i < L; ++i) v[i] = 1 + 2 * k[i * D] - k[i * D + 1]; /* a linear function of the key */

  /* README: C */
  float ridge = 1e-6f;
  lla_forward_args args;
  lla_forward_args_init(&args);
  args.q = view(q, L, D), args.k = view(k, L, D), args.v = view(v, L, 1), args.o = view(o, L, 1);
  args.ridge = (lla_tensor){.data = &ridge, .dtype = LLA_F32}; /* one number; per head, token or dimension works too */
  lla_options options;
  lla_options_init(&options);
  options.causal = 0;
  args.options = &options;

  lla_forward_sizes sizes = {.struct_size = sizeof sizes};
  if (lla_forward_query(&args, &sizes) == LLA_OK)
    args.workspace = aligned_alloc(256, (args.workspace_bytes = (sizes.workspace_bytes + 255) / 256 * 256));
  if (lla_forward(&args) != LLA_OK) {
    fprintf(stderr, "%s\n", lla_last_error());
    return 1;
  }
  /* README: end */
  free(args.workspace);

  double worst = 0;
  for (int i = 0; i < L; ++i) worst = fmax(worst, fabs(o[i] - (1 + 2 * q[i * D] - q[i * D + 1])));
  printf("lla %s: the linear function was recovered at every query to %.1e\n", lla_version(), worst);
  return worst < 1e-3 ? 0 : 1;
}
