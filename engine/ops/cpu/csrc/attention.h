// Causal paged attention: the loops around two products, shared by the vector and the AMX kernels.
//
// Whole prefills, chunks and decodes are one path. A work item is up to ITEM_ROWS query rows of one sequence: of one KV
// head, or in a decode of several, which then walk the blocks together: neighbours in memory are read close in time. A
// row is (token, head in the group), so that a group's heads read K and V once. Keys are walked in units that are fixed
// by absolute position and never by the batch:
//
//   tile     16 keys: how KV lies in memory (kernels.h), found through the block table
//   step    128 keys: one update of the online softmax (Milakov & Gimelshein 2018): running maximum m, sum l, output o
//   section 512 keys: starts afresh; finished sections merge in ascending order. Few, long sequences may have their
//           sections computed by different threads (as flash-decoding does) with the same bits.
//
//        keys 0        128       256       384       512 ...
//   row   |--- step ---|--- step ---|--- step ---|--- step ---||--- step ---| ...
//          m, l, o  ->  m, l, o  ->  ...          section 0    ||  section 1       merge(0, 1), ...
//                                            ^ pos: keys after it are masked; steps after it are skipped
//
// Why a row's bits depend on its query and the KV at its own positions alone: products never mix rows; a masked key
// has probability exactly 0, and adding 0 changes nothing but the sign of a zero, which the last "+ 0" settles; a
// step or section that lies wholly after the row's position is skipped for that row. Slots after the sequence's end
// may hold NaN: their scores are replaced before any arithmetic and their V rows are zeroed in a copy.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "scratch.h"
#include "threads.h"
#include "vec.h"

namespace cpu_ops {
namespace {

constexpr int STEP_KEYS = 128;
constexpr int STEP_TILES = STEP_KEYS / PANEL;
constexpr int SECTION_KEYS = 512;

struct Item {
  int64_t sequence, kv_head, heads;  // KV heads, from kv_head on
  int64_t first_row, rows;           // for each: rows of the sequence's (token, head in group), flattened
  int64_t last_position;
  int64_t section_begin, section_end;
};

// Softmax state of one row over some keys: output[d] / sum is the attention over them.
struct RowState {
  float largest = -INFINITY;  // score, scaled
  float sum = 0.0f;           // of exp(score - largest)
};

INLINE float exp1(float x) { return exp(broadcast(x))[0]; }

// Merge the state of later keys into the state of earlier ones.
inline void merge(RowState& into, float* output, const RowState& from, const float* from_output, int64_t head_dim) {
  const float largest = into.largest > from.largest ? into.largest : from.largest;
  const float keep = exp1(into.largest - largest), take = exp1(from.largest - largest);
  into.sum = into.sum * keep + from.sum * take;
  into.largest = largest;
  for (int64_t d = 0; d < head_dim; d += LANES)
    store(output + d, fma(load(from_output + d), broadcast(take), load(output + d) * keep));
}

template <class T>
void write_row(const RowState& state, const float* output, int64_t head_dim, T* out) {
  const float inverse = 1.0f / state.sum;
  for (int64_t d = 0; d < head_dim; d += LANES) store(out + d, load(output + d) * inverse + 0.0f);
}

// One step of one row: scores [STEP_KEYS] become probabilities relative to the row's running maximum, in place.
// Returns what the earlier output is worth now.
inline float softmax_step(float* scores, int tiles, int64_t visible, float scale, RowState& state) {
  const int64_t vectors = tiles * LANES_16;
  std::fill(scores + visible, scores + tiles * PANEL, -INFINITY);
  Vec largest[LANES_16], sum[LANES_16] = {};
  for (Vec& v : largest) v = broadcast(-INFINITY);
  for (int64_t i = 0; i < vectors; i += LANES_16)
    for (int v = 0; v < LANES_16; v++) largest[v] = max(load(scores + (i + v) * LANES), largest[v]);
  const float now = std::max(state.largest, reduce_max(largest) * scale);
  for (int64_t i = 0; i < vectors; i += LANES_16)
    for (int v = 0; v < LANES_16; v++) {
      float* const at = scores + (i + v) * LANES;
      const Vec p = exp(fma(load(at), broadcast(scale), broadcast(-now)));
      store(at, p);
      sum[v] += p;
    }
  const float worth = exp1(state.largest - now);
  state.sum = state.sum * worth + reduce_add(sum);
  state.largest = now;
  return worth;
}

// A V tile whose first `written` keys are kept and whose other keys are zero.
template <class T>
void zero_unwritten(const T* v_tile, int64_t written, int64_t head_dim, T* copy) {
  constexpr int STEP = K_STEP<T>;
  for (int64_t i = 0; i < PANEL * head_dim; i++) {
    const int64_t key = i / (PANEL * STEP) % (PANEL / STEP) * STEP + i % STEP;
    copy[i] = key < written ? v_tile[i] : T{};
  }
}

// Products gives T, ITEM_ROWS, ITEM_HEADS and, for the rows of one item's head (K and V tiles as in kernels.h):
//   Products(layout)
//   load_queries(head, rows, row -> const T*)
//   scores(head, k_tiles, v_tiles, tiles, scores)   scores[row][STEP_KEYS] = q k^T
//   values(v_tiles, next_tiles, tiles, p, out)      out[row][head_dim] = p v
// Each also prefetches the tiles that are read next: blocks are scattered, which the hardware does not foresee.
template <class Products>
class Attention {
 public:
  using T = typename Products::T;
  static constexpr int ITEM_ROWS = Products::ITEM_ROWS;

  Attention(const T* q, const T* kv, const KvLayout& layout, const AttentionBatch& batch, T* out, int threads)
      : q_(q), kv_(kv), layout_(layout), batch_(batch), out_(out), threads_(threads) {
    head_dim_ = layout.head_dim;
    group_ = batch.heads / layout.num_kv_heads;
    plan_items();
  }

  void run() {
    for (int64_t s = 0; s < batch_.sequences; s++)
      if (batch_.context_lens[s] == 0)  // padding
        std::fill(out_ + batch_.query_start[s] * batch_.heads * head_dim_,
                  out_ + batch_.query_start[s + 1] * batch_.heads * head_dim_, T{});
    static thread_local Scratch states, outputs;
    if (split_) {
      const int64_t parts = batch_.query_start[batch_.sequences] * batch_.heads * max_sections_;
      states_ = states.get<RowState>(parts);
      outputs_ = outputs.get<float>(parts * head_dim_);
    }
    parallel(threads_, static_cast<int64_t>(items_.size()), [&](Tasks& tasks) {
      static thread_local Scratch memory;
      Products products(layout_);
      for (int64_t index; tasks.next(index);) {
        // A guess: with equal items, this thread's next one.
        const size_t next = std::min(static_cast<size_t>(index) + threads_, items_.size() - 1);
        attend(items_[index], items_[next], products, memory);
      }
    });
    if (split_)
      parallel_for(threads_, batch_.sequences * batch_.heads, 1,
                   [&](int64_t i) { merge_sections(i / batch_.heads, i % batch_.heads); });
  }

 private:
  // The batch as work items, the longest first. With too few items for the threads, heads go apart, then sections of
  // long contexts; that changes who computes what, never the order of a sum.
  void plan_items() {
    const int64_t enough = 4 * threads_;
    add_items(Products::ITEM_HEADS);
    if (static_cast<int64_t>(items_.size()) < enough) {
      items_.clear();
      add_items(1);
    }
    split_ = static_cast<int64_t>(items_.size()) < enough && max_sections_ > 1;
    if (split_) {
      std::vector<Item> sections;
      for (const Item& item : items_)
        for (int64_t section = 0; section < item.section_end; section++) {
          sections.push_back(item);
          sections.back().section_begin = section;
          sections.back().section_end = section + 1;
        }
      items_ = std::move(sections);
    }
    const auto work = [](const Item& item) {
      return (std::min(item.section_end * SECTION_KEYS, item.last_position + 1) - item.section_begin * SECTION_KEYS) *
             item.rows * item.heads;
    };
    std::stable_sort(items_.begin(), items_.end(), [&](const Item& a, const Item& b) { return work(a) > work(b); });
    int64_t total = 0;
    for (const Item& item : items_) total += work(item);
    if (total * head_dim_ < 1 << 15) threads_ = 1;
  }

  void add_items(int64_t most_heads) {
    for (int64_t s = 0; s < batch_.sequences; s++) {
      if (batch_.context_lens[s] == 0) continue;
      const int64_t rows = (batch_.query_start[s + 1] - batch_.query_start[s]) * group_;
      for (int64_t row = 0; row < rows; row += ITEM_ROWS) {
        const int64_t count = std::min<int64_t>(ITEM_ROWS, rows - row);
        const int64_t last = first_position(s) + (row + count - 1) / group_;
        max_sections_ = std::max(max_sections_, last / SECTION_KEYS + 1);
        const int64_t together = std::min(most_heads, ITEM_ROWS / count);
        for (int64_t head = 0; head < layout_.num_kv_heads; head += together)
          items_.push_back(
              {s, head, std::min(together, layout_.num_kv_heads - head), row, count, last, 0, last / SECTION_KEYS + 1});
      }
    }
  }

  int64_t first_position(int64_t sequence) const {
    return batch_.context_lens[sequence] - (batch_.query_start[sequence + 1] - batch_.query_start[sequence]);
  }

  int64_t position(const Item& item, int64_t row) const {
    return first_position(item.sequence) + (item.first_row + row) / group_;
  }

  // The row's place among the m * heads rows of q and out.
  int64_t row_at(const Item& item, int64_t head, int64_t row) const {
    const int64_t at = item.first_row + row, kv_head = item.kv_head + head;
    return (batch_.query_start[item.sequence] + at / group_) * batch_.heads + kv_head * group_ + at % group_;
  }

  // The K tiles of `count` times 16 keys from key on; after the item's last tile, that one again.
  void find_tiles(const Item& item, int64_t head, int64_t key, int count, const T** tiles) const {
    const int32_t* const table = batch_.block_tables + item.sequence * batch_.table_stride;
    const T* const kv = kv_ + (item.kv_head + head) * layout_.head_size();
    const int64_t last = item.last_position / PANEL;
    int64_t tile = std::min(key / PANEL, last);
    int64_t block = tile / layout_.tiles_per_block, in_block = tile % layout_.tiles_per_block;
    for (int i = 0; i < count; i++) {
      tiles[i] = kv + table[block] * layout_.block_size() + in_block * layout_.tile_size();
      if (tile == last) continue;
      tile++;
      if (++in_block == layout_.tiles_per_block) {
        in_block = 0;
        block++;
      }
    }
  }

  void attend(const Item& item, const Item& next_item, Products& products, Scratch& memory) const {
    float* const output = memory.get<float>(3 * ITEM_ROWS * head_dim_ + ITEM_ROWS * STEP_KEYS + PANEL * head_dim_);
    float* const section_output = output + ITEM_ROWS * head_dim_;
    float* const buffers = section_output + ITEM_ROWS * head_dim_;
    const int64_t rows = item.rows, all_rows = item.heads * rows;  // row `row` of head `head` at head * rows + row
    for (int64_t head = 0; head < item.heads; head++)
      products.load_queries(head, rows, [&](int64_t row) { return q_ + row_at(item, head, row) * head_dim_; });

    RowState total[ITEM_ROWS];
    const int64_t end = std::min(item.section_end * SECTION_KEYS, item.last_position + 1);
    for (int64_t section = item.section_begin; section < item.section_end; section++) {
      RowState state[ITEM_ROWS];
      std::fill(section_output, section_output + all_rows * head_dim_, 0.0f);
      const int64_t section_end = std::min((section + 1) * SECTION_KEYS, end);
      for (int64_t key = section * SECTION_KEYS; key < section_end; key += STEP_KEYS)
        for (int64_t head = 0; head < item.heads; head++) {
          const T* next_tiles[STEP_TILES];
          if (head + 1 < item.heads)
            find_tiles(item, head + 1, key, STEP_TILES, next_tiles);
          else if (key + STEP_KEYS < end)
            find_tiles(item, 0, key + STEP_KEYS, STEP_TILES, next_tiles);
          else
            find_tiles(next_item, 0, next_item.section_begin * SECTION_KEYS, STEP_TILES, next_tiles);
          const int64_t keys = std::min<int64_t>(section_end - key, STEP_KEYS);
          step(item, head, key, keys, next_tiles, products, state + head * rows,
               section_output + head * rows * head_dim_, buffers);
        }
      for (int64_t i = 0; i < all_rows; i++) {
        const int64_t row = i % rows;
        if (position(item, row) < section * SECTION_KEYS) continue;
        const float* const from = section_output + i * head_dim_;
        if (split_) {
          const int64_t at = row_at(item, i / rows, row) * max_sections_ + section;
          states_[at] = state[i];
          std::copy(from, from + head_dim_, outputs_ + at * head_dim_);
        } else if (section == 0) {
          total[i] = state[i];
          std::copy(from, from + head_dim_, output + i * head_dim_);
        } else {
          merge(total[i], output + i * head_dim_, state[i], from, head_dim_);
        }
      }
    }
    if (!split_)
      for (int64_t i = 0; i < all_rows; i++)
        write_row(total[i], output + i * head_dim_, head_dim_, out_ + row_at(item, i / rows, i % rows) * head_dim_);
  }

  // One step of one head's rows: `keys` keys from `key` on, folded into state and output.
  void step(const Item& item, int64_t head, int64_t key, int64_t keys, const T* const* next_tiles, Products& products,
            RowState* state, float* output, float* buffers) const {
    float* const step_output = buffers;
    float* const scores = step_output + ITEM_ROWS * head_dim_;
    T* const last_values = reinterpret_cast<T*>(scores + ITEM_ROWS * STEP_KEYS);
    const int tiles = static_cast<int>((keys + PANEL - 1) / PANEL);
    const T *k_tiles[STEP_TILES], *v_tiles[STEP_TILES];
    find_tiles(item, head, key, tiles, k_tiles);
    for (int i = 0; i < tiles; i++) v_tiles[i] = k_tiles[i] + layout_.value_offset();
    const int64_t written = batch_.context_lens[item.sequence] - key - (tiles - 1) * PANEL;
    if (written < PANEL) {
      zero_unwritten(v_tiles[tiles - 1], written, head_dim_, last_values);
      v_tiles[tiles - 1] = last_values;
    }
    products.scores(head, k_tiles, v_tiles, tiles, scores);
    float worth[ITEM_ROWS];
    for (int64_t row = 0; row < item.rows; row++) {
      const int64_t visible = std::min<int64_t>(position(item, row) - key + 1, tiles * PANEL);
      if (visible > 0) worth[row] = softmax_step(scores + row * STEP_KEYS, tiles, visible, batch_.scale, state[row]);
    }
    products.values(v_tiles, next_tiles, tiles, scores, step_output);
    for (int64_t row = 0; row < item.rows; row++)
      if (position(item, row) >= key)
        for (int64_t d = row * head_dim_; d < (row + 1) * head_dim_; d += LANES)
          store(output + d, fma(load(output + d), broadcast(worth[row]), load(step_output + d)));
  }

  void merge_sections(int64_t sequence, int64_t head) const {
    if (batch_.context_lens[sequence] == 0) return;
    const int64_t begin = batch_.query_start[sequence], end = batch_.query_start[sequence + 1];
    for (int64_t m = begin; m < end; m++) {
      const int64_t row = m * batch_.heads + head, at = row * max_sections_;
      RowState state = states_[at];
      float* const sum = outputs_ + at * head_dim_;
      for (int64_t section = 1; section <= (first_position(sequence) + m - begin) / SECTION_KEYS; section++)
        merge(state, sum, states_[at + section], outputs_ + (at + section) * head_dim_, head_dim_);
      write_row(state, sum, head_dim_, out_ + row * head_dim_);
    }
  }

  const T *q_, *kv_;
  const KvLayout layout_;
  const AttentionBatch batch_;
  T* out_;
  int threads_;
  int64_t head_dim_, group_, max_sections_ = 1;
  std::vector<Item> items_;
  bool split_ = false;
  RowState* states_ = nullptr;  // when split: [m * heads][max_sections]
  float* outputs_ = nullptr;    // and their outputs, [..][head_dim]
};

}  // namespace
}  // namespace cpu_ops
