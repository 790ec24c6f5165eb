// Runs forward, backward and best path on random DAGs in arrays of exact size, built with -fsanitize=address,undefined.
//
// Host kernels by default; with -DSTATES_ALIGNMENT_ON_DEVICE and -include simt.h the device kernels. It checks that the
// posteriors of a feasible sequence sum to its targets, so that a kernel that does nothing fails.
#include "../include/states_alignment.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#ifdef STATES_ALIGNMENT_ON_DEVICE
#include "../src/states_alignment_cuda.cu"
#else
#include "../src/states_alignment_cpu.cpp"
#endif

namespace {

void require(bool is_true, const char* what) {
  if (is_true) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

template <class Real>
void check(std::mt19937& random, int32_t dtype, int64_t batch, int64_t max_targets, int64_t max_states, double std,
           double missing) {
  // rows with a gap behind them, or without; the arrays end with their last row
  const int64_t has_gaps = std::uniform_int_distribution<int64_t>(0, 1)(random);
  const int64_t emit_row = max_states + 3 * has_gaps, trans_row = max_states + 5 * has_gaps;
  const auto size = [&](int64_t num_rows, int64_t row) {
    return static_cast<size_t>(std::max<int64_t>((num_rows - 1) * row + max_states, 0));
  };
  std::vector<Real> log_emit(size(batch * max_targets, emit_row)), log_trans(size(batch * max_states, trans_row));
  std::vector<int64_t> target_lengths, state_lengths;
  std::normal_distribution<double> normal(-3.0, std);
  std::uniform_real_distribution<double> uniform;
  const Real none = -std::numeric_limits<Real>::infinity();
  for (Real& x : log_emit) x = static_cast<Real>(normal(random));
  for (Real& x : log_trans) x = uniform(random) < missing ? none : static_cast<Real>(normal(random));
  for (int64_t b = 0; b < batch; ++b) {
    // some lengths are negative or beyond their axes, and are clamped
    target_lengths.push_back(std::uniform_int_distribution<int64_t>(-1, max_targets + 1)(random));
    state_lengths.push_back(std::uniform_int_distribution<int64_t>(max_states / 2, max_states + 1)(random));
  }
  const states_alignment_batch arguments{log_emit.data(), log_trans.data(), target_lengths.data(),
                                         state_lengths.data(), batch, max_targets, max_states, max_targets * emit_row,
                                         emit_row, max_states * trans_row, trans_row, dtype};
  std::vector<Real> nll(static_cast<size_t>(batch)), grad_nll(static_cast<size_t>(batch), Real{1});
  std::vector<Real> grad_emit(static_cast<size_t>(batch * max_targets * max_states), Real{7});
  std::vector<Real> grad_trans(static_cast<size_t>(batch * max_states * max_states), Real{7});
  std::vector<int64_t> nodes(static_cast<size_t>(batch * max_targets));
#ifdef STATES_ALIGNMENT_ON_DEVICE
  const int64_t slots = (max_targets + STATES_ALIGNMENT_ROW_PAD) / STATES_ALIGNMENT_ROW_PAD * STATES_ALIGNMENT_ROW_PAD;
  std::vector<int32_t> saved(static_cast<size_t>(batch * 2 * (2 * max_states + 1) * slots));
  std::vector<double> scratch(static_cast<size_t>((batch * max_states * slots * 12 + 7) / 8));
  require(states_alignment_forward_cuda(&arguments, nll.data(), saved.data(), 2, 0, nullptr) == 0, "forward");
  require(states_alignment_backward_cuda(&arguments, saved.data(), grad_nll.data(), grad_emit.data(),
                                         grad_trans.data(), 0, nullptr) == 0,
          "backward");
  require(states_alignment_best_cuda(&arguments, scratch.data(), nodes.data(), 0, nullptr) == 0, "best");
#else
  std::vector<Real> saved(static_cast<size_t>(batch * states_alignment_saved_words_cpu(max_targets, max_states)));
  require(states_alignment_forward_cpu(&arguments, nll.data(), nullptr, 2) == 0, "forward alone");
  require(states_alignment_forward_cpu(&arguments, nll.data(), saved.data(), 2) == 0, "forward");
  require(states_alignment_backward_cpu(&arguments, saved.data(), grad_nll.data(), grad_emit.data(),
                                        grad_trans.data(), 2) == 0,
          "backward");
  require(states_alignment_best_cpu(&arguments, nodes.data(), 2) == 0, "best");
#endif
  for (int64_t b = 0; b < batch; ++b) {
    double emitted = 0, taken = 0;
    for (int64_t i = 0; i < max_targets * max_states; ++i) {
      emitted -= static_cast<double>(grad_emit[static_cast<size_t>(b * max_targets * max_states + i)]);
    }
    for (int64_t i = 0; i < max_states * max_states; ++i) {
      taken -= static_cast<double>(grad_trans[static_cast<size_t>(b * max_states * max_states + i)]);
    }
    const bool is_feasible = std::isfinite(nll[static_cast<size_t>(b)]);
    const int64_t targets = std::clamp<int64_t>(target_lengths[static_cast<size_t>(b)], 0, max_targets);
    const double expected = is_feasible ? static_cast<double>(targets) : 0.0;
    require(!std::isnan(nll[static_cast<size_t>(b)]), "a loss is NaN");
    require(std::abs(emitted - expected) < 1e-3, "posteriors of nodes do not sum to the targets");
    require(std::abs(taken - expected - (is_feasible ? 1.0 : 0.0)) < 1e-3, "posteriors of edges do not sum up");
    require(max_targets == 0 || is_feasible == (nodes[static_cast<size_t>(b * max_targets)] >= 0), "best path");
  }
}

#ifndef STATES_ALIGNMENT_ON_DEVICE
// Whatever the lengths of a sequence are, its columns fit into the saved block.
void check_saved_words(int64_t max_targets, int64_t max_states) {
  const int64_t words = states_alignment_saved_words_cpu(max_targets, max_states);
  for (int64_t targets = 1; targets <= max_targets; ++targets) {
    for (int64_t states = targets + 2; states <= max_states; ++states) {
      const states_alignment::Shape shape{targets, states};
      require(2 * states_alignment::Columns<float>::layout_of(shape).size <= words, "saved block in float32");
      require(2 * states_alignment::Columns<double>::layout_of(shape).size <= words, "saved block in float64");
    }
  }
}
#endif

}  // namespace

int main() {
  std::mt19937 random(0);
#ifndef STATES_ALIGNMENT_ON_DEVICE
  for (const int64_t max_targets : {1, 7, 40, 77, 150, 154, 290}) check_saved_words(max_targets, 310);
#endif
  const int64_t shapes[][3] = {{0, 3, 8},  {3, 0, 5},   {1, 1, 3},   {2, 1, 3},    {5, 7, 16},
                               {1, 4, 17}, {9, 20, 65}, {2, 40, 170}, {1, 100, 102}};
  for (const auto& [batch, targets, states] : shapes) {
    for (const double std : {1.0, 30.0, 300.0}) {
      for (const double missing : {0.0, 0.5, 0.95}) {
        check<float>(random, STATES_ALIGNMENT_FLOAT32, batch, targets, states, std, missing);
#ifndef STATES_ALIGNMENT_ON_DEVICE
        check<double>(random, STATES_ALIGNMENT_FLOAT64, batch, targets, states, std, missing);
#endif
      }
    }
  }
  std::puts("clean");
}
