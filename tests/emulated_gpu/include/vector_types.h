// CUDA's small vectors.
#pragma once

#define LLA_EMULATED_VECTORS(T, name, align2, align4)                          \
  struct alignas(align2) name##2 {                                             \
    T x, y;                                                                    \
  };                                                                           \
  struct name##3 {                                                             \
    T x, y, z;                                                                 \
  };                                                                           \
  struct alignas(align4) name##4 {                                             \
    T x, y, z, w;                                                              \
  };                                                                           \
  inline constexpr name##2 make_##name##2(T x, T y) { return {x, y}; }         \
  inline constexpr name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
  inline constexpr name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
LLA_EMULATED_VECTORS(float, float, 8, 16)
LLA_EMULATED_VECTORS(double, double, 16, 16)
LLA_EMULATED_VECTORS(int, int, 8, 16)
LLA_EMULATED_VECTORS(unsigned, uint, 8, 16)
LLA_EMULATED_VECTORS(unsigned short, ushort, 4, 8)
#undef LLA_EMULATED_VECTORS

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
