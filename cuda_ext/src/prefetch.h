// Prefetches memory that the CPU does not foresee.
#ifndef STATES_ALIGNMENT_PREFETCH_H_
#define STATES_ALIGNMENT_PREFETCH_H_

#include <stdint.h>

namespace states_alignment {

// Rows of memory that will be read later. A few are prefetched at a time, between other work, so that they arrive while
// the CPU computes.
class Prefetch {
 public:
  // Drops rows that were not prefetched yet.
  template <class T>
  void plan(const T* from, int64_t row_size, int64_t row_stride, int64_t num_rows) {
    next_ = reinterpret_cast<const char*>(from);
    row_bytes_ = row_size * static_cast<int64_t>(sizeof(T));
    stride_bytes_ = row_stride * static_cast<int64_t>(sizeof(T));
    num_rows_ = row_size > 0 ? num_rows : 0;
  }
  void ask() {
    for (int64_t asked = 0; num_rows_ > 0 && asked < kBytesAtATime; asked += row_bytes_) {
      for (int64_t byte = 0; byte < row_bytes_; byte += kLine) __builtin_prefetch(next_ + byte, 0, kToL2);
      __builtin_prefetch(next_ + row_bytes_ - 1, 0, kToL2);
      next_ += stride_bytes_;
      --num_rows_;
    }
  }

 private:
  static constexpr int64_t kBytesAtATime = 2560, kLine = 64;
  static constexpr int kToL2 = 2;  // as __builtin_prefetch counts
  const char* next_ = nullptr;
  int64_t row_bytes_ = 0;
  int64_t stride_bytes_ = 0;
  int64_t num_rows_ = 0;
};

}  // namespace states_alignment

#endif  // STATES_ALIGNMENT_PREFETCH_H_
