// Simulator that runs the device kernels on a host: the CUDA names that they use, in plain C++. Use g++ with -include.
//
// Blocks run one after the other. The threads of a block are fibers that run until they reach a barrier, so a missing
// barrier shows as a result that depends on the order in which fibers are resumed; `simt_set_order` chooses it. Shared
// memory starts as NaN. A barrier that not all threads reach, or a warp whose lanes wait at different ones, aborts.
#ifndef STATES_ALIGNMENT_SIMT_H_
#define STATES_ALIGNMENT_SIMT_H_

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#define SA_KERNEL
#define SA_KERNEL_PER_SM(blocks)
#define SA_DEVICE inline
#define SA_DEVICE_NOINLINE __attribute__((noinline))
#define SA_SHARED_MEMORY(name) unsigned char* name = simt::machine().shared_memory()
#define SA_LAUNCH(kernel, blocks, threads, shared_bytes, stream, ...) \
  simt::machine().launch([&] { kernel(__VA_ARGS__); }, blocks, threads, shared_bytes, stream)

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };

// Functions that leave a stack. AddressSanitizer would take each such jump for the end of all frames that it jumps over.
#define SIMT_SWITCH __attribute__((no_sanitize("address"), noinline))

namespace simt {

struct Index {
  unsigned x;
};

enum class State { kReady, kAtBlockBarrier, kAtWarpBarrier, kDone };

class Machine {
 public:
  static constexpr int kWarpSize = 32;
  static constexpr int kDevices = 8;
  static constexpr size_t kStackBytes = 1 << 17;
  static constexpr size_t kMaxSharedBytes = 99 << 10;  // of the smallest supported device

  Index thread{0};
  Index block{0};
  int order = 0;  // 0 ascending, 1 descending, else the seed of a shuffle at every barrier
  int device = 0;
  cudaError_t error = cudaSuccess;

  unsigned char* shared_memory() { return shared_.data(); }

  void launch(const std::function<void()>& kernel, int64_t blocks, int threads, size_t shared_bytes, void*) {
    if (blocks <= 0 || shared_bytes > kMaxSharedBytes) {
      error = cudaErrorInvalidValue;
      return;
    }
    kernel_ = &kernel;
    shared_.resize(kMaxSharedBytes + 16);
    for (int64_t i = 0; i < blocks; ++i) {
      block.x = static_cast<unsigned>(i);
      std::memset(shared_.data(), 0xff, shared_.size());
      run_block(threads);
    }
  }

  SIMT_SWITCH void wait(State barrier) {
    Fiber& fiber = fibers_[thread.x];
    fiber.state = barrier;
    if (__builtin_setjmp(fiber.place) == 0) leave();
  }

 private:
  // A fiber is begun by `setcontext` and goes on where it stopped by a jump: `swapcontext` would ask the system for the
  // signal mask at every barrier, and under AddressSanitizer wipe what is known of the fiber's stack.
  using Place = void* [5];  // of __builtin_setjmp

  struct Fiber {
    Place place;
    State state;
    bool is_begun;
    std::unique_ptr<char[]> stack = std::make_unique<char[]>(kStackBytes);
  };

  SIMT_SWITCH static void enter() {
    Machine& self = machine_instance();
    (*self.kernel_)();
    self.fibers_[self.thread.x].state = State::kDone;
    self.leave();
  }

  SIMT_SWITCH [[noreturn]] void leave() { __builtin_longjmp(scheduler_, 1); }

  SIMT_SWITCH [[noreturn]] void go_on(Fiber& fiber) {
    if (fiber.is_begun) __builtin_longjmp(fiber.place, 1);
    fiber.is_begun = true;
    getcontext(&start_);
    start_.uc_stack.ss_sp = fiber.stack.get();
    start_.uc_stack.ss_size = kStackBytes;
    start_.uc_link = nullptr;
    makecontext(&start_, &Machine::enter, 0);
    setcontext(&start_);
    std::abort();
  }

  SIMT_SWITCH void resume(size_t i) {
    thread.x = static_cast<unsigned>(i);
    if (__builtin_setjmp(scheduler_) == 0) go_on(fibers_[i]);
  }

  friend Machine& machine();
  static Machine& machine_instance() {
    static Machine instance;
    return instance;
  }

  void run_block(int threads) {
    const size_t count = static_cast<size_t>(threads);
    if (fibers_.size() < count) fibers_.resize(count);
    count_ = count;
    make_ready(0, count);
    for (Fiber& fiber : fibers_) fiber.is_begun = false;
    std::vector<unsigned> turn(count);
    for (size_t i = 0; i < count; ++i) turn[i] = static_cast<unsigned>(order == 1 ? count - 1 - i : i);
    std::mt19937 random(static_cast<unsigned>(order));
    do {
      if (order > 1) std::shuffle(turn.begin(), turn.end(), random);
      for (const unsigned i : turn) {
        if (fibers_[i].state == State::kReady) resume(i);
      }
    } while (release());
  }

  // Resumes the threads whose barrier is complete; false when all threads are done.
  bool release() {
    if (all(0, count_, State::kDone)) return false;
    if (all(0, count_, State::kAtBlockBarrier)) {
      make_ready(0, count_);
      return true;
    }
    bool released = false;
    for (size_t first = 0; first < count_; first += kWarpSize) {
      if (!all(first, first + kWarpSize, State::kAtWarpBarrier)) continue;
      make_ready(first, first + kWarpSize);
      released = true;
    }
    if (!released) {
      std::fprintf(stderr, "block %u: a barrier that not all threads reach\n", block.x);
      std::abort();
    }
    return true;
  }

  bool all(size_t first, size_t end, State state) const {
    for (size_t i = first; i < end; ++i) {
      if (fibers_[i].state != state) return false;
    }
    return true;
  }

  void make_ready(size_t first, size_t end) {
    for (size_t i = first; i < end; ++i) fibers_[i].state = State::kReady;
  }

  const std::function<void()>* kernel_ = nullptr;
  Place scheduler_;
  ucontext_t start_;
  std::vector<Fiber> fibers_;
  size_t count_ = 0;  // of the threads of a block
  std::vector<unsigned char> shared_;
};

inline Machine& machine() { return Machine::machine_instance(); }

}  // namespace simt

#define threadIdx (simt::machine().thread)
#define blockIdx (simt::machine().block)

inline void __syncthreads() { simt::machine().wait(simt::State::kAtBlockBarrier); }
inline void __syncwarp() { simt::machine().wait(simt::State::kAtWarpBarrier); }
inline int atomicMax(int* address, int value) {
  const int old = *address;
  *address = std::max(old, value);
  return old;
}

inline int atomicAdd(int* address, int value) {
  const int old = *address;
  *address += value;
  return old;
}
inline void __threadfence() {}

inline cudaError_t cudaMemset2DAsync(void* memory, size_t pitch, int value, size_t width, size_t height, cudaStream_t) {
  for (size_t row = 0; row < height; ++row) std::memset(static_cast<char*>(memory) + row * pitch, value, width);
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = simt::machine().device;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  if (device >= simt::Machine::kDevices) return simt::machine().error = cudaErrorInvalidValue;
  simt::machine().device = device;
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() {
  const cudaError_t error = simt::machine().error;
  simt::machine().error = cudaSuccess;
  return error;
}
inline const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "invalid value"; }
struct cudaFuncAttributes {};
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel) {
  return cudaGetLastError();
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int bytes) {
  return static_cast<size_t>(bytes) <= simt::Machine::kMaxSharedBytes ? cudaSuccess : cudaErrorInvalidValue;
}

#define SA_EXPORT extern "C" inline __attribute__((visibility("default"), used))
SA_EXPORT void simt_set_order(int order) { simt::machine().order = order; }
SA_EXPORT void simt_fail() { simt::machine().error = cudaErrorInvalidValue; }  // the next call that asks gets it

#endif  // STATES_ALIGNMENT_SIMT_H_
