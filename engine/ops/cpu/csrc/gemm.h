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
//     for task = group of panels            dynamic over threads
//       for leaf, for k_stay inputs         as much of A as L2 holds: all of it when rows are few
//         for panels that run together      ... so that the weight is then read front to back
//           for chain of k
//             for strip of rows             the B chunk stays in L1, A streams past it
#pragma once

#include <omp.h>

#include <algorithm>

#include "scratch.h"
#include "vec.h"

namespace cpu_ops {
namespace {

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
  static int slots(int64_t leaves) {  // partial sums alive at once, the leaf in the making included
    int n = 1;
    for (; leaves > 1; leaves /= 2) n++;
    return n;
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

// How `rows` rows split into strips: evenly, or full ones first.
template <class Kernel>
struct Strips {
  int64_t rows, count;
  explicit Strips(int64_t rows) : rows(rows), count((rows + Kernel::STRIP_ROWS - 1) / Kernel::STRIP_ROWS) {}
  int64_t first(int64_t strip) const {
    return Kernel::EVEN_STRIPS ? strip * rows / count : strip * Kernel::STRIP_ROWS;
  }
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
//   a_size(rows, k)                                                    elements of a packed strip
//   pack(x, x_stride, rows, shape, a)
//   multiply(a, rows, a_k, b, b_panel, panels, k, c, c_panel, first)   c = or += one chain
template <class Kernel, class Y>
void linear(const typename Kernel::T* x, const typename Kernel::T* packed, const float* bias, const LinearShape& shape,
            Y* y, int threads) {
  using A = typename Kernel::A;
  const int64_t k = shape.leaves * shape.leaf_k_padded, panels = (shape.n + PANEL - 1) / PANEL;
  if (shape.m * k * panels * PANEL < 1 << 16) threads = 1;
  const int64_t block_rows = std::min<int64_t>(shape.m, Kernel::BLOCK_ROWS);
  const int64_t c_rows = (block_rows + Kernel::STRIP_ROWS - 1) / Kernel::STRIP_ROWS * Kernel::STRIP_ROWS;
  const int slots = TreeSum<void (*)(int, int)>::slots(shape.leaves);
  const int64_t together = Kernel::panels_together(Strips<Kernel>(block_rows).size(0));
  int64_t group = std::max<int64_t>(1, std::min<int64_t>(8, panels / (threads * 8)));
  group = (group + together - 1) / together * together;

  const int64_t k_fits = Kernel::A_BYTES / static_cast<int64_t>(sizeof(A)) / c_rows / Kernel::K_CHAIN;
  const int64_t k_stay = std::max<int64_t>(1, k_fits) * Kernel::K_CHAIN;

  static thread_local Scratch packed_rows;
  A* const a = packed_rows.get<A>(Kernel::a_size(c_rows, k));

#pragma omp parallel num_threads(threads)
  {
    static thread_local Scratch partial_sums;
    [[maybe_unused]] const typename Kernel::Session session{};
    const int64_t c_panel = c_rows * PANEL, c_slot = c_panel * group;
    float* const c = partial_sums.get<float>(c_slot * slots);

    for (int64_t m0 = 0; m0 < shape.m; m0 += block_rows) {
      const Strips<Kernel> strips(std::min(block_rows, shape.m - m0));
#pragma omp for schedule(static)
      for (int64_t strip = 0; strip < strips.count; strip++) {
        const int64_t first = strips.first(strip);
        Kernel::pack(x + (m0 + first) * shape.x_stride, shape.x_stride, strips.size(strip), shape,
                     a + Kernel::a_size(first, k));
      }

#pragma omp for schedule(dynamic)
      for (int64_t panel = 0; panel < panels; panel += group) {
        const int width = static_cast<int>(std::min(group, panels - panel));
        const auto add = [&](int into, int from) {
          float* const left = c + into * c_slot;
          const float* const right = c + from * c_slot;
          for (int p = 0; p < width; p++)
            for_lanes(strips.rows * PANEL, [&](int64_t i, int count) {
              const int64_t at = p * c_panel + i;
              store(left + at, load(left + at, count) + load(right + at, count), count);
            });
        };
        TreeSum tree(add);
        for (int64_t leaf = 0; leaf < shape.leaves; leaf++) {
          float* const sum = c + tree.top() * c_slot;
          for (int64_t k_block = 0; k_block < shape.leaf_k_padded; k_block += k_stay)
            for (int64_t p = 0; p < width; p += together)
              for (int64_t k0 = k_block, end = std::min(k_block + k_stay, shape.leaf_k_padded); k0 < end;
                   k0 += Kernel::K_CHAIN) {
                const int64_t k_at = leaf * shape.leaf_k_padded + k0;
                for (int64_t strip = 0; strip < strips.count; strip++) {
                  const int64_t first = strips.first(strip);
                  Kernel::multiply(a + Kernel::a_size(first, k), strips.size(strip), k_at,
                                   packed + ((panel + p) * k + k_at) * PANEL, k * PANEL,
                                   static_cast<int>(std::min(together, width - p)),
                                   std::min<int64_t>(Kernel::K_CHAIN, end - k0), sum + p * c_panel + first * PANEL,
                                   c_panel, k0 == 0);
                }
              }
          tree.push();
        }
        tree.finish();
        write_outputs(c, c_panel, strips.rows, width, bias == nullptr ? nullptr : bias + panel * PANEL,
                      y + m0 * shape.n + panel * PANEL, shape.n, shape.n - panel * PANEL);
      }
    }
  }
}

}  // namespace
}  // namespace cpu_ops
