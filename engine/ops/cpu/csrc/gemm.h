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
//   tree:   the leaves, added as engine/ops/tree.py adds them              (TreeSum)
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

#include "scratch.h"
#include "threads.h"
#include "vec.h"

namespace cpu_ops {
namespace {

// Partial sums of the shard tree alive at once, the leaf in the making included.
inline int tree_slots(int64_t leaves) {
  int n = 1;
  for (; leaves > 1; leaves /= 2) n++;
  return n;
}

// The shard tree as leaves arrive in order: like a binary counter, equal complete subtrees merge at once; what is left
// at the end merges from the right. add(into, from) adds a finished partial sum to the one before it.
template <class Add>
class TreeSum {
 public:
  explicit TreeSum(Add add) : add_(add) {}
  int top() const { return depth_; }  // where the next leaf goes
  void push() {
    leaves_++;
    depth_++;
    for (int64_t bits = leaves_; bits % 2 == 0; bits /= 2) merge();
  }
  void finish() {
    while (depth_ > 1) merge();
  }

 private:
  void merge() {
    add_(depth_ - 2, depth_ - 1);
    depth_--;
  }
  Add add_;
  int depth_ = 0;
  int64_t leaves_ = 0;
};

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

template <class Y>
void write_outputs(const float* c, int64_t c_panel, int64_t rows, int panels, const float* bias, Y* y, int64_t n,
                   int64_t columns) {
  for (int64_t row = 0; row < rows; row++)
    for (int p = 0; p < panels; p++) {
      const int width = static_cast<int>(std::min<int64_t>(PANEL, columns - p * PANEL));
      const float* from = c + p * c_panel + row * PANEL;
      for_lanes(width, [&](int64_t i, int count) {
        Vec sum = load(from + i, count);
        if (bias != nullptr) sum += load(bias + p * PANEL + i, count);
        store(y + row * n + p * PANEL + i, sum, count);
      });
    }
}

// Kernel gives T (of x and the weight), A (of packed rows), Session (alive while a thread multiplies), STRIP_ROWS,
// EVEN_STRIPS, BLOCK_ROWS, K_CHAIN, A_BYTES (of a block's rows that L2 holds while panels pass), and
//   better_halved(rows)                                                whether one strip of these rows should be two
//   a_size(rows, k)                                                    elements of a packed strip
//   panels_together(rows of a strip)
//   pack(x, x_stride, rows, shape, a)
//   multiply(a, rows, a_k, b, b_panel, panels, k, c, c_panel, first, strip, strips)   c = or += one chain
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
    const int64_t blocks = std::max<int64_t>(1, (shape.m + Kernel::BLOCK_ROWS / 2) / Kernel::BLOCK_ROWS);
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
          sum_leaves(a, strips, panel, width, c);
          write_outputs(c, c_panel_, strips.rows, width, bias_ == nullptr ? nullptr : bias_ + panel * PANEL,
                        y_ + m0 * shape_.n + panel * PANEL, shape_.n, shape_.n - panel * PANEL);
        }
      });
    }
  }

 private:
  static int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

  // The shard tree of `width` panels from `panel` on, into c's first slot: [panel][row][16].
  void sum_leaves(const A* a, const Strips<Kernel>& strips, int64_t panel, int width, float* c) const {
    TreeSum tree([&](int into, int from) {
      for (int p = 0; p < width; p++)
        for_lanes(strips.rows * PANEL, [&](int64_t i, int count) {
          float* const left = c + into * c_slot_ + p * c_panel_ + i;
          store(left, load(left, count) + load(c + from * c_slot_ + p * c_panel_ + i, count), count);
        });
    });
    for (int64_t leaf = 0; leaf < shape_.leaves; leaf++) {
      sum_leaf(a, strips, leaf * shape_.leaf_k_padded, panel, width, c + tree.top() * c_slot_);
      tree.push();
    }
    tree.finish();
  }

  void sum_leaf(const A* a, const Strips<Kernel>& strips, int64_t leaf_k, int64_t panel, int width, float* sum) const {
    for (int64_t stay = 0; stay < shape_.leaf_k_padded; stay += k_stay_) {
      const int64_t end = std::min(stay + k_stay_, shape_.leaf_k_padded);
      for (int64_t p = 0; p < width; p += together_)
        for (int64_t k = stay; k < end; k += Kernel::K_CHAIN)
          for (int64_t strip = 0; strip < strips.count; strip++) {
            const int64_t first = strips.first(strip);
            Kernel::multiply(a + Kernel::a_size(first, k_), strips.size(strip), leaf_k + k,
                             packed_ + ((panel + p) * k_ + leaf_k + k) * PANEL, k_ * PANEL,
                             static_cast<int>(std::min(together_, width - p)),
                             std::min<int64_t>(Kernel::K_CHAIN, end - k), sum + p * c_panel_ + first * PANEL, c_panel_,
                             k == 0, strip, strips.count);
          }
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
