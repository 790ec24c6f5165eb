// Storage of log probabilities in device memory: float32, or 16 bits that are widened when read.
//
// It uses plain bit arithmetic, not the toolkit's types, so that tests run the same code on a host.
#ifndef STATES_ALIGNMENT_ELEMENT_H_
#define STATES_ALIGNMENT_ELEMENT_H_

#include "log_math.h"

namespace states_alignment {

struct Float16 {
  uint16_t bits;
};

struct Bfloat16 {
  uint16_t bits;
};

SA_HOST_DEVICE float to_float(float x) { return x; }

SA_HOST_DEVICE float to_float(Bfloat16 x) {
  return ScalarLane<float>::real(static_cast<int32_t>(static_cast<uint32_t>(x.bits) << 16));
}

SA_HOST_DEVICE float to_float(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t exponent = (x.bits >> 10) & 31u, fraction = x.bits & 0x3ffu;
  if (exponent == 0) {  // zero and subnormal numbers: fraction * 2^-24
    const float magnitude = static_cast<float>(fraction) * 5.9604644775390625e-8f;
    return sign ? -magnitude : magnitude;
  }
  const uint32_t wide = exponent == 31 ? 255u : exponent + 112u;
  return ScalarLane<float>::real(static_cast<int32_t>(sign | (wide << 23) | (fraction << 13)));
}

SA_HOST_DEVICE void store(float* to, float x) { *to = x; }

// Round to nearest, ties to even.
SA_HOST_DEVICE void store(Bfloat16* to, float x) {
  const uint32_t bits = static_cast<uint32_t>(ScalarLane<float>::bits(x));
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  to->bits = is_nan ? uint16_t{0x7fc0} : static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

SA_HOST_DEVICE void store(Float16* to, float x) {
  const uint32_t bits = static_cast<uint32_t>(ScalarLane<float>::bits(x));
  const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  uint32_t result;
  if (magnitude > 0x7f800000u) {
    result = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // 65520 and more
    result = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 rounds to multiples of 2^-24 in the low bits
    const float shifted = ScalarLane<float>::real(static_cast<int32_t>(magnitude)) + 0.5f;
    result = static_cast<uint32_t>(ScalarLane<float>::bits(shifted)) - 0x3f000000u;
  } else {
    result = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  to->bits = static_cast<uint16_t>(sign | result);
}

}  // namespace states_alignment

#endif  // STATES_ALIGNMENT_ELEMENT_H_
