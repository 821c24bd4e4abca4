// What bindings.cpp calls: plain pointers, sizes and strides, no torch. Strides count elements.
//
// Every function obeys the op contract of engine/ops/__init__.py: a row's bits depend on that row's inputs alone, not
// on the number of rows or threads. `threads` is the most threads to use. T is float or bf16 unless said
// otherwise.
#pragma once

#include <cstdint>

namespace cpu_ops {

// A bfloat16 in memory; arithmetic is always float32.
struct bf16 {
  uint16_t bits;
};

constexpr int PANEL = 16;          // outputs side by side in a packed weight, keys side by side in a KV tile
constexpr int VOCAB_CHUNK = 2048;  // as in engine/ops/__init__.py
constexpr int MAX_HEAD_DIM = 512;

// ---- gemm.cpp, gemm_amx.cpp

// y [m, n] = the shard tree's sum over leaves of x [m, k] times a packed weight, plus bias, rounded once to Y.
struct LinearShape {
  int64_t m, n;
  int64_t leaf_k;         // inputs of one leaf
  int64_t leaf_k_padded;  // a multiple of what the kernel takes at once; the weight is zero there
  int64_t leaves;
  int64_t x_stride;
};

template <class T>
void pack_linear(const T* weight, const LinearShape& shape, T* packed, int threads);

template <class T, class Y>
void linear_vector(const T* x, const T* packed, const float* bias, const LinearShape& shape, Y* y, int threads);

template <class Y>
void linear_amx(const bf16* x, const bf16* packed, const float* bias, const LinearShape& shape, Y* y, int threads);

// ---- elementwise.cpp

// Rows of a strided view [outer, inner, n], n contiguous.
struct Rows {
  int64_t outer, inner, n;
  int64_t outer_stride, inner_stride;
};

template <class T>
void rms_norm(const T* x, const Rows& rows, const T* weight, float eps, T* out, int threads);

// sum = x + residual in T; out = its norm. All [m, n], contiguous.
template <class T>
void add_rms_norm(const T* x, const T* residual, int64_t m, int64_t n, const T* weight, float eps, T* out, T* sum,
                  int threads);

// gate_up [m, 2 n] to silu(gate) * up [m, n].
template <class T>
void silu_mul(const T* gate_up, int64_t m, int64_t n, T* out, int threads);

void gather_rows(const void* table, const int64_t* ids, int64_t m, int64_t row_bytes, void* out, int threads);

// ---- One layer's KV memory. A tile holds 16 keys of one head: K, then V.
//
//   block   [kv_head][block_size / 16] tiles, contiguous
//   float   K [d][16 keys]                        V [d / 16][16 keys][16 d]
//   bf16    K [d / 2][16 keys][2], pairs of d     V [d / 16][8][16 d][2], pairs of keys
//
// Both are the B operand of their product as they lie, in panels like a packed weight's: lanes (or tile columns) run
// over keys for q K^T and over d for p V. k_dim is head_dim rounded up to what the matrix unit takes; the rows above
// head_dim hold zeros.
struct KvLayout {
  int64_t num_kv_heads, head_dim, k_dim, tiles_per_block;
  int64_t tile_size() const { return PANEL * (k_dim + head_dim); }
  int64_t value_offset() const { return PANEL * k_dim; }
  int64_t head_size() const { return tiles_per_block * tile_size(); }
  int64_t block_size() const { return num_kv_heads * head_size(); }
};

struct HeadRows {  // [m, heads, head_dim], head_dim contiguous
  int64_t heads, row_stride, head_stride;
};

// Rotate q into q_out (contiguous) and k, and store k and v at slots; a negative slot is not stored.
template <class T>
void rope_and_store(const T* q, const HeadRows& q_rows, const T* k, const HeadRows& k_rows, const T* v,
                    const HeadRows& v_rows, int64_t m, const float* rope, const int64_t* positions,
                    const int64_t* slots, T* kv, const KvLayout& layout, T* q_out, int threads);

// ---- attention.cpp, attention_amx.cpp

struct AttentionBatch {
  const int64_t* query_start;   // [sequences + 1]
  const int64_t* context_lens;  // [sequences], this step's tokens included
  const int32_t* block_tables;  // [sequences, table_stride]
  int64_t sequences, table_stride;
  int64_t heads;
  float scale;
};

// q [m, heads, head_dim] contiguous to out, the same shape.
template <class T>
void attention_vector(const T* q, const T* kv, const KvLayout& layout, const AttentionBatch& batch, T* out,
                      int threads);

void attention_amx(const bf16* q, const bf16* kv, const KvLayout& layout, const AttentionBatch& batch, bf16* out,
                   int threads);

// ---- vocab.cpp

// logits [m, n] float32 to the lowest index of each row's maximum and its logprob.
void greedy(const float* logits, int64_t m, int64_t n, int64_t* ids, float* logprobs, int threads);

void logprobs_of(const float* logits, int64_t m, int64_t n, const int64_t* ids, float* logprobs, int threads);

}  // namespace cpu_ops
