// The inner loop of both the sweeps and the transition gradient.
#ifndef STATES_ALIGNMENT_BLOCK_PRODUCT_H_
#define STATES_ALIGNMENT_BLOCK_PRODUCT_H_

#include "lattice.h"
#include "simd.h"

namespace states_alignment {

// Vectors side by side in one product: with kBlock columns each, their sums fill half to all of the registers.
constexpr int kProductVectors = kVectorBytes == 64 ? 2 : 1;

// Place of the scalar of a term and a column: scalars[term * by_term + column * by_column].
struct ScalarStrides {
  int64_t by_term;
  int64_t by_column;
};

// sums[i][column] += sum over k of vectors[i][k] * scalars[k][column], where vectors[i] starts `vector_stride` after
// vectors[i - 1], and vectors[i][k] is one vector.
template <class Lane, int kVectors>
inline void block_product(const typename Lane::Scalar* vectors, int64_t vector_stride,
                          const typename Lane::Scalar* scalars, ScalarStrides strides, int64_t count,
                          typename Lane::Real (&sums)[kVectors][kBlock]) {
  typename Lane::Real sum[kVectors][kBlock];
  for (int i = 0; i < kVectors; ++i) {
    for (int column = 0; column < kBlock; ++column) sum[i][column] = sums[i][column];
  }
  for (int64_t k = 0; k < count; ++k) {
    typename Lane::Real vector[kVectors];
    for (int i = 0; i < kVectors; ++i) vector[i] = Lane::load(vectors + i * vector_stride + k * Lane::kWidth);
    for (int column = 0; column < kBlock; ++column) {
      const typename Lane::Real scalar = Lane::splat(scalars[k * strides.by_term + column * strides.by_column]);
      for (int i = 0; i < kVectors; ++i) sum[i][column] += vector[i] * scalar;
    }
  }
  for (int i = 0; i < kVectors; ++i) {
    for (int column = 0; column < kBlock; ++column) sums[i][column] = sum[i][column];
  }
}

}  // namespace states_alignment

#endif  // STATES_ALIGNMENT_BLOCK_PRODUCT_H_
