// The 16-bit conversions of src/element.h as C functions over arrays, for a test that compares them with torch's.
#include "../src/element.h"

using namespace states_alignment;

template <class Element>
static void widen(int64_t count, const uint16_t* from, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_float(Element{from[i]});
}

template <class Element>
static void narrow(int64_t count, const float* from, uint16_t* to) {
  for (int64_t i = 0; i < count; ++i) {
    Element element;
    store(&element, from[i]);
    to[i] = element.bits;
  }
}

extern "C" {
void widen_float16(int64_t count, const uint16_t* from, float* to) { widen<Float16>(count, from, to); }
void widen_bfloat16(int64_t count, const uint16_t* from, float* to) { widen<Bfloat16>(count, from, to); }
void narrow_float16(int64_t count, const float* from, uint16_t* to) { narrow<Float16>(count, from, to); }
void narrow_bfloat16(int64_t count, const float* from, uint16_t* to) { narrow<Bfloat16>(count, from, to); }
}
