// Numbers of any magnitude, for host and device: the arithmetic that replaces log_add in the recursion.
//
// A probability is kept as mantissa * 2^exponent, a float beside an integer of the same width. Compared with its
// logarithm it needs no exp and log per addition, and it keeps 24 bits whatever its magnitude: the float32 logarithm of
// a typical path (-2000 nats) has an ulp of 1e-4, which is an error of 1e-4 in a posterior.
//
// `Lane` is the type of the arithmetic: `ScalarLane` here, `SimdLane` in simd.h. It supplies the types and the few
// operations that differ in C++ between a scalar and a vector; `?:` chooses lane by lane.
#ifndef STATES_ALIGNMENT_LOG_MATH_H_
#define STATES_ALIGNMENT_LOG_MATH_H_

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define SA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define SA_HOST_DEVICE inline
#endif

namespace states_alignment {

// Exponent of zero; the sum of three exponents still fits an int32.
constexpr int32_t kDead = -(1 << 28);
// Largest exponent; numbers below 2^-kMaxExponent are zero.
constexpr int32_t kMaxExponent = 1 << 27;
// Log probabilities below -kLogRange are zero, above kLogRange invalid.
constexpr int32_t kLogRange = 1 << 20;

template <class Real>
struct Format;

template <>
struct Format<float> {
  using Int = int32_t;
  static constexpr int kMantissaBits = 23;
  static constexpr int kBias = 127;
  static constexpr float kRoundingShift = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer in the low bits
  static constexpr float kLn2High = 0.693359375f;       // ten bits, so that n * kLn2High is exact without an FMA
  static constexpr float kLn2Low = -2.12194440e-4f;
  static constexpr int kExpTerms = 7;  // |r| <= ln(2) / 2: the first omitted term is 5e-9
  // Block products take alpha relative to a power of two, at most 2^kWide below the largest alpha, and edges up to
  // 2^kSteep, so all sums stay finite. If no factor is below 2^-kWide, nothing underflows. Up to 4,096 terms that
  // underflow are below rounding: beside a sum of 2^kLeastSum if the alpha underflows (at most 2^-126) and its edge
  // does not; beside a sum of 2^kLeastShare times the largest alpha if the edge underflows (at most 2^-125).
  static constexpr int kLeastSum = -70;
  static constexpr int kLeastShare = -89;
  static constexpr int kWide = 60;
  static constexpr int kSteep = 16;
  // Scores: at least ln(2^-kWide), at most ln(2^kSteep), and the least that bounded_exp does not treat as zero.
  static constexpr float kLogFaint = -41.5f, kLogSteep = 11.0f, kLogLeast = -87.0f;
};

template <>
struct Format<double> {
  using Int = int64_t;
  static constexpr int kMantissaBits = 52;
  static constexpr int kBias = 1023;
  static constexpr double kRoundingShift = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLn2High = 6.93147180369123816490e-01;
  static constexpr double kLn2Low = 1.90821492927058770002e-10;
  static constexpr int kExpTerms = 13;
  static constexpr int kLeastSum = -880;
  static constexpr int kLeastShare = -956;
  static constexpr int kWide = 480;
  static constexpr int kSteep = 60;
  static constexpr double kLogFaint = -332.0, kLogSteep = 41.5, kLogLeast = -708.0;
};

template <class RealType>
struct ScalarLane {
  using Scalar = RealType;
  using ScalarInt = typename Format<RealType>::Int;
  using Real = RealType;
  using Int = ScalarInt;
  SA_HOST_DEVICE static Real splat(Scalar x) { return x; }
  SA_HOST_DEVICE static Int splat_int(ScalarInt x) { return x; }
  SA_HOST_DEVICE static Int bits(Real x) {
    Int result;
    memcpy(&result, &x, sizeof result);
    return result;
  }
  SA_HOST_DEVICE static Real real(Int x) {
    Real result;
    memcpy(&result, &x, sizeof result);
    return result;
  }
};

// mantissa * 2^exponent. Normal form: mantissa in [0.5, 2), or mantissa 0 and exponent kDead.
template <class Lane>
struct Scaled {
  typename Lane::Real mantissa;
  typename Lane::Int exponent;
};

template <class Lane>
SA_HOST_DEVICE typename Lane::Int larger(typename Lane::Int a, typename Lane::Int b) {
  return a > b ? a : b;
}

// 2^n for n <= 127 (1023 in float64), zero in place of subnormal numbers.
template <class Lane>
SA_HOST_DEVICE typename Lane::Real power_of_two(typename Lane::Int n) {
  using F = Format<typename Lane::Scalar>;
  const typename Lane::Int biased = larger<Lane>(n + F::kBias, Lane::splat_int(0));
  return Lane::real(biased << F::kMantissaBits);
}

template <int n>
constexpr double kFactorial = n * kFactorial<n - 1>;
template <>
constexpr double kFactorial<0> = 1.0;

// Taylor series of exp from r^kTerm / kTerm! on, divided by r^kTerm, in Horner form.
template <class Lane, int kTerm>
SA_HOST_DEVICE typename Lane::Real exp_series(typename Lane::Real r) {
  using Scalar = typename Lane::Scalar;
  constexpr Scalar kCoefficient = static_cast<Scalar>(1.0 / kFactorial<kTerm>);
  if constexpr (kTerm == Format<Scalar>::kExpTerms) {
    return Lane::splat(kCoefficient);
  } else {
    return exp_series<Lane, kTerm + 1>(r) * r + kCoefficient;
  }
}

// exp(x) in normal form, x at most kLogRange; zero for x < -kLogRange and for NaN.
template <class Lane>
SA_HOST_DEVICE Scaled<Lane> scaled_exp(typename Lane::Real x) {
  using Scalar = typename Lane::Scalar;
  using F = Format<Scalar>;
  const auto alive = x > Lane::splat(-static_cast<Scalar>(kLogRange));
  const auto in_range = x < Lane::splat(static_cast<Scalar>(kLogRange));
  const typename Lane::Real y = alive ? (in_range ? x : Lane::splat(static_cast<Scalar>(kLogRange))) : Lane::splat(0);
  const typename Lane::Real shifted = y * static_cast<Scalar>(1.4426950408889634) + F::kRoundingShift;
  const typename Lane::Real n = shifted - F::kRoundingShift;
  const typename Lane::Real r = (y - n * F::kLn2High) - n * F::kLn2Low;
  const typename Lane::Real sum = exp_series<Lane, 0>(r);
  const typename Lane::Int exponent = Lane::bits(shifted) - Lane::bits(Lane::splat(F::kRoundingShift));
  return {alive ? sum : Lane::splat(0), alive ? exponent : Lane::splat_int(kDead)};
}

// exp(x) as a plain number; exp(kLogSteep) for larger x, zero below kLogLeast, NaN for NaN.
template <class Lane>
SA_HOST_DEVICE typename Lane::Real bounded_exp(typename Lane::Real x) {
  using Scalar = typename Lane::Scalar;
  using F = Format<Scalar>;
  const typename Lane::Real low = Lane::splat(F::kLogLeast), high = Lane::splat(F::kLogSteep);
  const typename Lane::Real above = low > x ? low : x;
  const typename Lane::Real y = high < above ? high : above;
  const typename Lane::Real shifted = y * static_cast<Scalar>(1.4426950408889634) + F::kRoundingShift;
  const typename Lane::Real n = shifted - F::kRoundingShift;
  const typename Lane::Real r = (y - n * F::kLn2High) - n * F::kLn2Low;
  const typename Lane::Real sum = exp_series<Lane, 0>(r);
  const typename Lane::Real result = Lane::real(Lane::bits(sum) + (Lane::bits(shifted) << F::kMantissaBits));
  return x < low ? Lane::splat(0) : result;
}

// Normal form of value * 2^exponent for a finite value >= 0.
template <class Lane>
SA_HOST_DEVICE Scaled<Lane> normalized(typename Lane::Real value, typename Lane::Int exponent) {
  using F = Format<typename Lane::Scalar>;
  using ScalarInt = typename Lane::ScalarInt;
  constexpr ScalarInt kFraction = (ScalarInt{1} << F::kMantissaBits) - 1;
  constexpr ScalarInt kOne = ScalarInt{F::kBias} << F::kMantissaBits;
  const typename Lane::Int bits = Lane::bits(value);
  const typename Lane::Int biased = bits >> F::kMantissaBits;
  const typename Lane::Int total = biased - F::kBias + exponent;
  // a subnormal value counts as zero: callers keep values in range or take the exact sum
  const auto alive = (biased > 0) & (total > -kMaxExponent);
  const typename Lane::Real mantissa = Lane::real((bits & kFraction) | kOne);
  const typename Lane::Int capped = total < kMaxExponent ? total : Lane::splat_int(kMaxExponent);
  return {alive ? mantissa : Lane::splat(0), alive ? capped : Lane::splat_int(kDead)};
}

// True for NaN and for values above kLogRange, +inf included: no log probabilities.
template <class Real>
SA_HOST_DEVICE bool is_invalid(Real log_probability) {
  return !(log_probability <= static_cast<Real>(kLogRange));
}

}  // namespace states_alignment

#endif  // STATES_ALIGNMENT_LOG_MATH_H_
