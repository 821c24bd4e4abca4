// y = x W^T (+ bias): the loops around a register-blocked kernel, shared by the vector and the AMX kernels.
//
// Packed weight: panels of 16 outputs; in a panel the leaves of the shard tree, in a leaf k ascending.
//
//     n ->  panel 0      panel 1     ...
//          +--------+   +--------+            a leaf of a panel is one contiguous run of memory:
//   leaf 0 | k x 16 |   | k x 16 |              float  [k][16]
//          +--------+   +--------+              bf16   [k / 2][16][2], pairs of consecutive k side by side
//   leaf 1 |        |   |        |            (k padded with zeros to what the kernel takes at once)
//          +--------+   +--------+
//
// Order of an output element's sum, the same for every m, thread and place in the batch:
//   chain:  K_CHAIN inputs accumulate in one register, k ascending         (the kernel)
//   leaf:   its chains, added in ascending order                           (`c`, float32)
//   tree:   the leaves, added as engine/ops/tree.py adds them              (merges_after)
//   then bias, then one rounding.
//
// Loops: blocks of rows are packed once into strips that the registers hold; a task is a few panels of one block.
//
//   for block of rows                       A, packed float32 or tiles: stays in L2 / L3
//     for task = group of panels            whichever thread is free
//       for leaf, for k_stay inputs         as much of A as L2 holds: all of it when rows are few
//         for panels that run together      ... so that the weight is then read front to back
//           for chain of k
//             for strip of rows             the B chunk stays in L1, A streams past it
#pragma once

#include <algorithm>
#include <bit>

#include "scratch.h"
#include "threads.h"
#include "vec.h"

namespace cpu_ops {
namespace {

// The shard tree as leaves arrive in order, like a binary counter: before leaf i, a finished subtree stands for every
// bit of i, the largest in slot 0; leaf i is summed in the slot after them, and equal subtrees merge at once. After the
// last leaf, what is left merges from the right.
inline int tree_slot(int64_t leaf) { return std::popcount(static_cast<uint64_t>(leaf)); }

inline int merges_after(int64_t leaf, int64_t leaves) {
  return leaf + 1 == leaves ? tree_slot(leaf) : std::countr_one(static_cast<uint64_t>(leaf));
}

inline int tree_slots(int64_t leaves) { return std::bit_width(static_cast<uint64_t>(leaves)); }

// How `rows` rows split into strips: evenly, or full ones first; a single one in two where the kernel is faster so.
template <class Kernel>
struct Strips {
  int64_t rows, count;
  explicit Strips(int64_t rows)
      : rows(rows), count(Kernel::better_halved(rows) ? 2 : (rows + Kernel::STRIP_ROWS - 1) / Kernel::STRIP_ROWS) {}
  int64_t first(int64_t strip) const { return Kernel::EVEN_STRIPS ? strip * rows / count : strip * Kernel::STRIP_ROWS; }
  int size(int64_t strip) const {
    return static_cast<int>(std::min(strip + 1 == count ? rows : first(strip + 1), rows) - first(strip));
  }
};

// Where the sum of a chain goes: to `at`, plus what is there if a chain of the leaf came before, then plus the sums of
// `merges` subtrees in the slots before it, into the last of these. Slots are `slot`, panels `panel` apart.
struct Sums {
  float* at;
  int64_t panel, slot;
  bool more;
  int merges;
};

constexpr int64_t BLOCK_BYTES = 6 << 20;  // of a block's packed rows: every task reads them, best from L3

// Kernel gives T (of x and the weight), A (of packed rows), Session (alive while a thread multiplies), STRIP_ROWS,
// EVEN_STRIPS, BLOCK_ROWS, K_CHAIN, A_BYTES (of a block's rows that L2 holds while panels pass), and
//   better_halved(rows)                                                whether one strip of these rows should be two
//   a_size(rows, k)                                                    elements of a packed strip
//   panels_together(rows of a strip)
//   pack(x, x_stride, rows, shape, a)
//   multiply(a, rows, a_k, b, b_panel, panels, k, sums, strip, strips)  one chain
template <class Kernel, class Y>
class Linear {
 public:
  using T = typename Kernel::T;
  using A = typename Kernel::A;

  Linear(const T* x, const T* packed, const float* bias, const LinearShape& shape, Y* y, int threads)
      : x_(x), packed_(packed), bias_(bias), shape_(shape), y_(y) {
    k_ = shape.leaves * shape.leaf_k_padded;
    panels_ = round_up(shape.n, PANEL) / PANEL;
    threads_ = shape.m * k_ * shape.n < 1 << 16 ? 1 : threads;
    // Blocks of about BLOCK_ROWS, evenly: a last block of few rows would read the weight again for little.
    const int64_t fit = BLOCK_BYTES / static_cast<int64_t>(sizeof(A)) / k_;
    const int64_t most_rows = std::clamp<int64_t>(fit, Kernel::STRIP_ROWS, Kernel::BLOCK_ROWS);
    const int64_t blocks = std::max<int64_t>(1, (shape.m + most_rows / 2) / most_rows);
    block_rows_ = round_up((shape.m + blocks - 1) / blocks, Kernel::STRIP_ROWS);
    together_ = Kernel::panels_together(Strips<Kernel>(std::min(block_rows_, shape.m)).size(0));
    const int64_t most = shape.leaves == 1 ? 8 : 4;
    group_ = round_up(std::clamp<int64_t>(panels_ / (threads_ * 8), 1, most), together_);
    const int64_t chains = Kernel::A_BYTES / static_cast<int64_t>(sizeof(A)) / block_rows_ / Kernel::K_CHAIN;
    k_stay_ = std::max<int64_t>(1, chains) * Kernel::K_CHAIN;
    c_panel_ = block_rows_ * PANEL;
    c_slot_ = c_panel_ * group_;
  }

  void run() const {
    static thread_local Scratch packed_rows;
    A* const a = packed_rows.get<A>(Kernel::a_size(block_rows_, k_));
    const int pack_threads = shape_.m * k_ <= 1 << 14 ? 1 : threads_;
    for (int64_t m0 = 0; m0 < shape_.m; m0 += block_rows_) {
      const Strips<Kernel> strips(std::min(block_rows_, shape_.m - m0));
      parallel_for(pack_threads, strips.count, 1, [&](int64_t strip) {
        const int64_t first = strips.first(strip);
        Kernel::pack(x_ + (m0 + first) * shape_.x_stride, shape_.x_stride, strips.size(strip), shape_,
                     a + Kernel::a_size(first, k_));
      });
      parallel(threads_, round_up(panels_, group_) / group_, [&](Tasks& tasks) {
        static thread_local Scratch partial_sums;
        [[maybe_unused]] const typename Kernel::Session session{};
        float* const c = partial_sums.get<float>(c_slot_ * tree_slots(shape_.leaves));
        for (int64_t task; tasks.next(task);) {
          const int64_t panel = task * group_;
          const int width = static_cast<int>(std::min(group_, panels_ - panel));
          for (int64_t leaf = 0; leaf < shape_.leaves; leaf++) sum_leaf(a, strips, m0, leaf, panel, width, c);
        }
      });
    }
  }

 private:
  static int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

  // A leaf of `width` panels from `panel` on, into its slot of c: [slot][panel][row][16].
  void sum_leaf(const A* a, const Strips<Kernel>& strips, int64_t m0, int64_t leaf, int64_t panel, int width,
                float* c) const {
    float* const sum = c + tree_slot(leaf) * c_slot_;
    const int64_t leaf_k = leaf * shape_.leaf_k_padded;
    for (int64_t stay = 0; stay < shape_.leaf_k_padded; stay += k_stay_) {
      const int64_t end = std::min(stay + k_stay_, shape_.leaf_k_padded);
      for (int64_t p = 0; p < width; p += together_)
        for (int64_t k = stay; k < end; k += Kernel::K_CHAIN)
          for (int64_t strip = 0; strip < strips.count; strip++) {
            const int64_t first = strips.first(strip);
            const int rows = strips.size(strip), panels = static_cast<int>(std::min(together_, width - p));
            float* const at = sum + p * c_panel_ + first * PANEL;
            const bool last = k + Kernel::K_CHAIN >= shape_.leaf_k_padded;
            const Sums sums{at, c_panel_, c_slot_, k != 0, last ? merges_after(leaf, shape_.leaves) : 0};
            Kernel::multiply(a + Kernel::a_size(first, k_), rows, leaf_k + k,
                             packed_ + ((panel + p) * k_ + leaf_k + k) * PANEL, k_ * PANEL, panels,
                             std::min<int64_t>(Kernel::K_CHAIN, end - k), sums, strip, strips.count);
            if (last && leaf + 1 == shape_.leaves)
              write_outputs(at - sums.merges * c_slot_, y_ + (m0 + first) * shape_.n, rows, panel + p, panels);
          }
    }
  }

  // A strip's finished sums, still in L1, with bias and rounded.
  void write_outputs(const float* sums, Y* y, int rows, int64_t panel, int panels) const {
    for (int p = 0; p < panels; p++) {
      const int64_t column = (panel + p) * PANEL;
      for_lanes(std::min<int64_t>(PANEL, shape_.n - column), [&](int64_t i, int count) {
        const float* from = sums + p * c_panel_ + i;
        Y* to = y + column + i;
        const Vec bias = bias_ == nullptr ? broadcast(-0.0f) : load(bias_ + column + i, count);  // x + -0 is x
        if (count == LANES)
          for (int row = 0; row < rows; row++) store(to + row * shape_.n, load(from + row * PANEL) + bias);
        else
          for (int row = 0; row < rows; row++) store(to + row * shape_.n, load(from + row * PANEL) + bias, count);
      });
    }
  }

  const T *x_, *packed_;
  const float* bias_;
  LinearShape shape_;
  Y* y_;
  int threads_;
  int64_t k_, panels_;
  int64_t block_rows_, together_, group_, k_stay_;
  int64_t c_panel_, c_slot_;  // elements of a panel's and of a group's partial sums
};

}  // namespace
}  // namespace cpu_ops
