// Messages of a status, for both libraries.
#ifndef STATES_ALIGNMENT_STATUS_H_
#define STATES_ALIGNMENT_STATUS_H_

#include "../include/states_alignment.h"

namespace states_alignment {

inline const char* message_of(int32_t status) {
  switch (status) {
    case STATES_ALIGNMENT_OK:
      return "done";
    case STATES_ALIGNMENT_BAD_DTYPE:
      return "these kernels do not take this dtype";
    case STATES_ALIGNMENT_BAD_SIZE:
      return "a size or a stride is negative or too large";
    case STATES_ALIGNMENT_OUT_OF_MEMORY:
      return "no memory for the scratch of any thread";
    case STATES_ALIGNMENT_BAD_ADDRESS:
      return "logits or bias are not aligned to 16 bytes";
    default:
      return "unknown status";
  }
}

inline bool has_negative_size(const states_alignment_batch& batch) {
  return batch.batch < 0 || batch.max_targets < 0 || batch.max_states < 0 || batch.emit_batch_stride < 0 ||
         batch.emit_row_stride < 0 || batch.trans_batch_stride < 0 || batch.trans_row_stride < 0;
}

}  // namespace states_alignment

#endif  // STATES_ALIGNMENT_STATUS_H_
