// Greedy token and logprobs: the vocabulary in chunks of VOCAB_CHUNK, each a (maximum, its lowest index, sum of
// exp(x - maximum)), combined in the shard tree's order, so that any split of the vocabulary at chunk boundaries gives
// the same bits.
#include <algorithm>
#include <cmath>

#include "scratch.h"
#include "threads.h"
#include "vec.h"

namespace cpu_ops {
namespace {

struct Chunk {
  float largest;
  int64_t index;
  double sum;  // of exp(x - largest)
};

Chunk reduce_chunk(const float* logits, int64_t first, int64_t n) {
  Vec largest[LANES_16], sum[LANES_16] = {};
  for (Vec& v : largest) v = broadcast(-INFINITY);
  const auto for_16 = [n](auto f) {
    for (int64_t i = 0; i < n; i += 16)
      for (int v = 0; v < LANES_16; v++) {
        const int64_t at = i + v * LANES;
        if (at < n) f(v, at, static_cast<int>(std::min<int64_t>(n - at, LANES)));
      }
  };
  const auto tail = [](Vec x, int count, float fill) {  // lanes past the end take no part
    return count == LANES ? x : iota() < static_cast<float>(count) ? x : broadcast(fill);
  };
  for_16([&](int v, int64_t at, int count) {
    largest[v] = max(tail(load(logits + at, count), count, -INFINITY), largest[v]);
  });
  const float top = reduce_max(largest);
  for_16([&](int v, int64_t at, int count) { sum[v] += exp(tail(load(logits + at, count), count, -INFINITY) - top); });
  int64_t index = 0;
  while (index + 1 < n && logits[index] != top) index++;
  return {top, first + index, static_cast<double>(reduce_add(sum))};
}

Chunk combine(const Chunk& left, const Chunk& right) {
  const Chunk& winner = right.largest > left.largest ? right : left;  // a tie goes to the lower index
  const Chunk& loser = right.largest > left.largest ? left : right;
  return {winner.largest, winner.index,
          winner.sum + loser.sum * std::exp(static_cast<double>(loser.largest) - winner.largest)};
}

// The order of engine/ops/tree.py: a range splits after the largest power of two below its length.
Chunk tree(const Chunk* chunks, int64_t count) {
  if (count == 1) return chunks[0];
  int64_t left = 1;
  while (left * 2 < count) left *= 2;
  return combine(tree(chunks, left), tree(chunks + left, count - left));
}

// f(row, its Chunk over the whole vocabulary)
template <class F>
void reduce_rows(const float* logits, int64_t m, int64_t n, int threads, F f) {
  const int64_t chunks = (n + VOCAB_CHUNK - 1) / VOCAB_CHUNK;
  static thread_local Scratch memory;
  Chunk* const parts = memory.get<Chunk>(m * chunks);
  if (m * n < 1 << 14) threads = 1;
  parallel_for(threads, m * chunks, 1, [&](int64_t part) {
    const int64_t first = part % chunks * VOCAB_CHUNK;
    parts[part] = reduce_chunk(logits + part / chunks * n + first, first, std::min<int64_t>(VOCAB_CHUNK, n - first));
  });
  for (int64_t row = 0; row < m; row++) f(row, tree(parts + row * chunks, chunks));
}

float logprob(float logit, const Chunk& all) {
  return static_cast<float>((static_cast<double>(logit) - all.largest) - std::log(all.sum));
}

}  // namespace

void greedy(const float* logits, int64_t m, int64_t n, int64_t* ids, float* logprobs, int threads) {
  reduce_rows(logits, m, n, threads, [&](int64_t row, const Chunk& all) {
    ids[row] = all.index;
    logprobs[row] = logprob(all.largest, all);
  });
}

void logprobs_of(const float* logits, int64_t m, int64_t n, const int64_t* ids, float* logprobs, int threads) {
  reduce_rows(logits, m, n, threads,
              [&](int64_t row, const Chunk& all) { logprobs[row] = logprob(logits[row * n + ids[row]], all); });
}

}  // namespace cpu_ops
