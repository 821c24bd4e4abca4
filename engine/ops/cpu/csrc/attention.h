// Causal paged attention: the loops around two products, shared by the vector and the AMX kernels.
//
// Whole prefills, chunks and decodes are one path. A work item is up to ITEM_ROWS query rows of one sequence and one KV
// head; a row is (token, head in the group), so that a group's heads read K and V once. Keys are walked in units that
// are fixed by absolute position and never by the batch:
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
  int64_t sequence, kv_head, first_row, rows;  // rows of the sequence's (token, head in group), flattened
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

// The batch as work items, the longest first. Sections of long contexts become items of their own when there would be
// too few items for the threads; that changes who computes what, never the order of a sum.
template <int ITEM_ROWS>
std::vector<Item> work_items(const AttentionBatch& batch, const KvLayout& layout, int threads, bool& split) {
  const int64_t group = batch.heads / layout.num_kv_heads;
  std::vector<Item> items;
  for (int64_t s = 0; s < batch.sequences; s++) {
    if (batch.context_lens[s] == 0) continue;
    const int64_t tokens = batch.query_start[s + 1] - batch.query_start[s];
    const int64_t first_position = batch.context_lens[s] - tokens;
    for (int64_t row = 0; row < tokens * group; row += ITEM_ROWS) {
      const int64_t rows = std::min<int64_t>(ITEM_ROWS, tokens * group - row);
      const int64_t last = first_position + (row + rows - 1) / group;
      for (int64_t head = 0; head < layout.num_kv_heads; head++)
        items.push_back({s, head, row, rows, last, 0, last / SECTION_KEYS + 1});
    }
  }
  split = static_cast<int64_t>(items.size()) < 4 * threads &&
          std::any_of(items.begin(), items.end(), [](const Item& item) { return item.section_end > 1; });
  if (split) {
    std::vector<Item> sections;
    for (Item item : items)
      for (int64_t section = 0, end = item.section_end; section < end; section++) {
        item.section_begin = section;
        item.section_end = section + 1;
        sections.push_back(item);
      }
    items = std::move(sections);
  }
  const auto keys = [](const Item& item) {
    return std::min((item.section_end - item.section_begin) * SECTION_KEYS, item.last_position + 1) * item.rows;
  };
  std::stable_sort(items.begin(), items.end(), [&](const Item& a, const Item& b) { return keys(a) > keys(b); });
  return items;
}

// Products gives T, ITEM_ROWS, and, for the rows of one item (K and V tiles as in kernels.h):
//   Products(layout)
//   load_queries(rows, row -> const T*)
//   scores(k_tiles, v_tiles, tiles, scores)             scores[row][STEP_KEYS] = q k^T
//   values(v_tiles, next_k_tiles, tiles, scores, out)   out[row][head_dim] = scores v
// Each also prefetches the tiles that the other will read next: blocks are scattered, which hardware does not foresee.
template <class Products>
void attention(const typename Products::T* q, const typename Products::T* kv, const KvLayout& layout,
               const AttentionBatch& batch, typename Products::T* out, int threads) {
  using T = typename Products::T;
  constexpr int ITEM_ROWS = Products::ITEM_ROWS;
  const int64_t head_dim = layout.head_dim, group = batch.heads / layout.num_kv_heads;
  bool split = false;
  const std::vector<Item> items = work_items<ITEM_ROWS>(batch, layout, threads, split);
  int64_t keys = 0, max_sections = 1;
  for (const Item& item : items) {
    keys += item.rows * (std::min(item.section_end * SECTION_KEYS, item.last_position + 1));
    max_sections = std::max(max_sections, item.section_end);
  }
  if (keys * head_dim < 1 << 15) threads = 1;

  for (int64_t s = 0; s < batch.sequences; s++)
    if (batch.context_lens[s] == 0)  // padding
      std::fill(out + batch.query_start[s] * batch.heads * head_dim,
                out + batch.query_start[s + 1] * batch.heads * head_dim, T{});

  // When split: every row's sections, [m * heads][max_sections].
  const int64_t rows = batch.query_start[batch.sequences] * batch.heads;
  static thread_local Scratch states_memory, outputs_memory;
  RowState* const states = split ? states_memory.get<RowState>(rows * max_sections) : nullptr;
  float* const outputs = split ? outputs_memory.get<float>(rows * max_sections * head_dim) : nullptr;

  parallel(threads, static_cast<int64_t>(items.size()), [&](Tasks& tasks) {
    static thread_local Scratch item_memory;
    float* const output = item_memory.get<float>(3 * ITEM_ROWS * head_dim + ITEM_ROWS * STEP_KEYS + PANEL * head_dim);
    float* const section_output = output + ITEM_ROWS * head_dim;
    float* const step_output = section_output + ITEM_ROWS * head_dim;
    float* const scores = step_output + ITEM_ROWS * head_dim;
    T* const last_values = reinterpret_cast<T*>(scores + ITEM_ROWS * STEP_KEYS);
    Products products(layout);

    for (int64_t index; tasks.next(index);) {
      const Item& item = items[index];
      const int64_t query_start = batch.query_start[item.sequence], context = batch.context_lens[item.sequence];
      const int64_t first_position = context - (batch.query_start[item.sequence + 1] - query_start);
      const int32_t* const table = batch.block_tables + item.sequence * batch.table_stride;
      const auto row_at = [&](int64_t row) {  // among the m * heads rows of q and out
        const int64_t at = item.first_row + row;
        return (query_start + at / group) * batch.heads + item.kv_head * group + at % group;
      };
      const auto position = [&](int64_t row) { return first_position + (item.first_row + row) / group; };
      const auto tile_at = [&](int64_t tile) {
        return kv + table[tile / layout.tiles_per_block] * layout.block_size() + item.kv_head * layout.head_size() +
               tile % layout.tiles_per_block * layout.tile_size();
      };
      products.load_queries(item.rows, [&](int64_t row) { return q + row_at(row) * head_dim; });

      RowState total[ITEM_ROWS];
      for (int64_t section = item.section_begin; section < item.section_end; section++) {
        RowState state[ITEM_ROWS];
        std::fill(section_output, section_output + item.rows * head_dim, 0.0f);
        const int64_t end = std::min((section + 1) * SECTION_KEYS, item.last_position + 1);
        for (int64_t key = section * SECTION_KEYS; key < end; key += STEP_KEYS) {
          const int tiles = static_cast<int>((std::min<int64_t>(end - key, STEP_KEYS) + PANEL - 1) / PANEL);
          const T *k_tiles[STEP_TILES], *v_tiles[STEP_TILES], *next_k_tiles[STEP_TILES];
          for (int i = 0; i < tiles; i++) {
            k_tiles[i] = tile_at(key / PANEL + i);
            v_tiles[i] = k_tiles[i] + layout.value_offset();
            next_k_tiles[i] = tile_at(std::min(key / PANEL + i + STEP_TILES, item.last_position / PANEL));
          }
          const int64_t written = context - key - (tiles - 1) * PANEL;
          if (written < PANEL) {
            zero_unwritten(v_tiles[tiles - 1], written, head_dim, last_values);
            v_tiles[tiles - 1] = last_values;
          }
          products.scores(k_tiles, v_tiles, tiles, scores);
          float worth[ITEM_ROWS];
          for (int64_t row = 0; row < item.rows; row++) {
            const int64_t visible = std::min<int64_t>(position(row) - key + 1, tiles * PANEL);
            if (visible > 0)
              worth[row] = softmax_step(scores + row * STEP_KEYS, tiles, visible, batch.scale, state[row]);
          }
          products.values(v_tiles, next_k_tiles, tiles, scores, step_output);
          for (int64_t row = 0; row < item.rows; row++)
            if (position(row) >= key)
              for (int64_t d = row * head_dim; d < (row + 1) * head_dim; d += LANES)
                store(section_output + d, fma(load(section_output + d), broadcast(worth[row]), load(step_output + d)));
        }
        for (int64_t row = 0; row < item.rows; row++) {
          if (position(row) < section * SECTION_KEYS) continue;
          const float* const from = section_output + row * head_dim;
          if (split) {
            const int64_t at = row_at(row) * max_sections + section;
            states[at] = state[row];
            std::copy(from, from + head_dim, outputs + at * head_dim);
          } else if (section == 0) {
            total[row] = state[row];
            std::copy(from, from + head_dim, output + row * head_dim);
          } else {
            merge(total[row], output + row * head_dim, state[row], from, head_dim);
          }
        }
      }
      if (!split)
        for (int64_t row = 0; row < item.rows; row++)
          write_row(total[row], output + row * head_dim, head_dim, out + row_at(row) * head_dim);
    }
  });

  if (split)
    parallel_for(threads, batch.sequences * batch.heads, 1, [&](int64_t index) {
      const int64_t s = index / batch.heads, head = index % batch.heads;
      for (int64_t m = batch.query_start[s]; batch.context_lens[s] > 0 && m < batch.query_start[s + 1]; m++) {
        const int64_t position = batch.context_lens[s] - batch.query_start[s + 1] + m;
        const int64_t row = m * batch.heads + head, at = row * max_sections;
        RowState state = states[at];
        float* const sum = outputs + at * head_dim;
        for (int64_t section = 1; section <= position / SECTION_KEYS; section++)
          merge(state, sum, states[at + section], outputs + (at + section) * head_dim, head_dim);
        write_row(state, sum, head_dim, out + row * head_dim);
      }
    });
}

}  // namespace
}  // namespace cpu_ops
