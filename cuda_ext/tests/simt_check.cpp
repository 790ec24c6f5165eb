// Kernels that show whether tests/simt.h detects a missing barrier, and one that not all threads reach.
// Compiled with -include simt.h.

static void sum_neighbours(const int* from, int* to, bool has_barrier) {
  SA_SHARED_MEMORY(memory);
  int* shared = reinterpret_cast<int*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  shared[thread] = from[thread];
  if (has_barrier) __syncthreads();
  to[thread] = shared[thread] + shared[(thread + 1) % 64];
}

static void half_of_a_block() {
  if (threadIdx.x < 32) __syncthreads();
}

SA_EXPORT void run_sum_neighbours(const int* from, int* to, int has_barrier) {
  SA_LAUNCH(sum_neighbours, 1, 64, 256, nullptr, from, to, has_barrier != 0);
}

SA_EXPORT void run_half_of_a_block() { SA_LAUNCH(half_of_a_block, 1, 64, 0, nullptr); }
