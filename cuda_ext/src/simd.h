// Vectors of the widest registers that the compiler targets, in GCC and Clang's vector extension: no intrinsics, so one
// source serves AVX-512, AVX2, SSE2 and NEON.
#ifndef STATES_ALIGNMENT_SIMD_H_
#define STATES_ALIGNMENT_SIMD_H_

#include <stdint.h>
#include <string.h>

#include "log_math.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace states_alignment {

#if defined(__AVX512F__) && defined(__AVX512DQ__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class RealType>
struct SimdLane {
  using Scalar = RealType;
  using ScalarInt = typename Format<RealType>::Int;
  typedef Scalar Real __attribute__((vector_size(kVectorBytes)));
  typedef ScalarInt Int __attribute__((vector_size(kVectorBytes)));
  static constexpr int kWidth = kVectorBytes / static_cast<int>(sizeof(Scalar));

  static Real splat(Scalar x) { return Real{} + x; }
  static Int splat_int(ScalarInt x) { return Int{} + x; }
  // 0, 1, 2 and so on.
  static Int counted() {
    Int result;
    for (int lane = 0; lane < kWidth; ++lane) result[lane] = lane;
    return result;
  }
  static Int bits(Real x) { return reinterpret_cast<Int>(x); }
  static Real real(Int x) { return reinterpret_cast<Real>(x); }

  // memcpy is the portable form of an unaligned load or store; it compiles to one instruction
  static Real load(const Scalar* from) {
    Real result;
    memcpy(&result, from, sizeof result);
    return result;
  }
  static Int load_int(const ScalarInt* from) {
    Int result;
    memcpy(&result, from, sizeof result);
    return result;
  }
  // `count` values of memory, then `rest`.
  static Real load(const Scalar* from, int64_t count, Scalar rest) {
    Real result = splat(rest);
    memcpy(&result, from, static_cast<size_t>(count) * sizeof(Scalar));
    return result;
  }
  static void store(Scalar* to, Real x) { memcpy(to, &x, sizeof x); }
  static void store_int(ScalarInt* to, Int x) { memcpy(to, &x, sizeof x); }

  // Lanes offset + kWidth - 1 down to `offset` of the concatenation of both vectors.
  static Real window_reversed(Real low, Real high, int64_t offset) {
    return shuffled(low, high, static_cast<ScalarInt>(offset) + (kWidth - 1) - counted());
  }
  static Int window_reversed(Int low, Int high, int64_t offset) {
    return shuffled(low, high, static_cast<ScalarInt>(offset) + (kWidth - 1) - counted());
  }
  // The last lane of `before`, then all but the last of `x`: the same as a load one place earlier.
  static Real moved_up(Real before, Real x) { return shuffled(before, x, (kWidth - 1) + counted()); }
  static Int moved_up(Int before, Int x) { return shuffled(before, x, (kWidth - 1) + counted()); }

  // x[i][j] becomes x[j][i].
  static void transpose(Real (&x)[kWidth]) {
#pragma GCC unroll 4
    for (int done = 1; done < kWidth; done *= 2) {
      Real y[kWidth];
#pragma GCC unroll 16
      for (int i = 0; i < kWidth / 2; ++i) {
        y[2 * i] = interleaved(x[i], x[i + kWidth / 2], 0);
        y[2 * i + 1] = interleaved(x[i], x[i + kWidth / 2], kWidth / 2);
      }
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) x[i] = y[i];
    }
  }

  static bool any(Int mask) {
    ScalarInt found = 0;
    for (int lane = 0; lane < kWidth; ++lane) found |= mask[lane];
    return found != 0;
  }

 private:
  // Lanes first, first + 1, ... of both, alternating.
  static Real interleaved(Real a, Real b, int first) {
    return shuffled(a, b, first + counted() / 2 + counted() % 2 * kWidth);
  }
  // Lane i is lane from[i] of the concatenation of both vectors.
  template <class Vector>
  static Vector shuffled(Vector low, Vector high, Int from) {
#if defined(__clang__)
    Vector result;
    for (int lane = 0; lane < kWidth; ++lane) {
      result[lane] = from[lane] < kWidth ? low[from[lane]] : high[from[lane] - kWidth];
    }
    return result;
#else
    return __builtin_shuffle(low, high, from);
#endif
  }
};

// Subnormal intermediate results are zero while one of these lives: some CPUs take 100 cycles for each.
class FlushSubnormals {
 public:
#if defined(__SSE2__)
  FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
  ~FlushSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
  FlushSubnormals() = default;
  ~FlushSubnormals() = default;

 public:
#endif
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;
};

}  // namespace states_alignment

#endif  // STATES_ALIGNMENT_SIMD_H_
