// A kernel that shows whether tests/simt.h detects a missing barrier. Compiled with -include simt.h.

static void sum_neighbours(const int* from, int* to, bool has_barrier) {
  SA_SHARED_MEMORY(memory);
  int* shared = reinterpret_cast<int*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  shared[thread] = from[thread];
  if (has_barrier) __syncthreads();
  to[thread] = shared[thread] + shared[(thread + 1) % 64];
}

SA_EXPORT void run_sum_neighbours(const int* from, int* to, int has_barrier) {
  SA_LAUNCH(sum_neighbours, 1, 64, 256, nullptr, from, to, has_barrier != 0);
}
