// From torch tensors to kernels.h: checks, allocates results, picks the type. One Python module per instruction set.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

#include <cstdint>
#include <functional>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels.h"

namespace cpu_ops::bindings {
namespace {

using at::Tensor;

template <class T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

// Refuses a tensor that has not exactly this type, or whose rows are not contiguous.
template <class T>
void exactly(const Tensor& t, const char* name) {
  TORCH_CHECK_VALUE(t.scalar_type() == c10::CppTypeToScalarType<T>::value, name, " must be ",
                    c10::CppTypeToScalarType<T>::value, ", not ", t.scalar_type());
  TORCH_CHECK_VALUE(t.numel() <= 1 || t.stride(-1) == 1, name, " must have contiguous rows");
}

int threads() { return at::get_num_threads(); }

// f(value of type T) for the two types that the ops know.
template <class F>
void by_type(const Tensor& t, F f) {
  if (t.scalar_type() == at::kFloat) return f(float{});
  TORCH_CHECK_VALUE(t.scalar_type() == at::kBFloat16, "the CPU ops take float32 and bfloat16, not ", t.scalar_type());
  f(bf16{});
}

// The calls of one run of some ops, to be made again without Python: on a CPU what a CUDA graph is on a GPU. A call
// holds its tensors, so their memory stays. Used as a context manager, it records what its thread runs.
class Graph {
 public:
  static bool recording() { return current_ != nullptr; }
  static void record(std::function<void()> call) { current_->calls_.push_back(std::move(call)); }

  void enter() {
    TORCH_CHECK(current_ == nullptr, "this thread records another graph");
    current_ = this;
  }
  void exit(const pybind11::args&) { current_ = nullptr; }

  void replay() const {
    pybind11::gil_scoped_release release;
    for (const auto& call : calls_) call();
  }

 private:
  static thread_local Graph* current_;
  std::vector<std::function<void()>> calls_;
};

thread_local Graph* Graph::current_ = nullptr;

// Makes a call of a kernel, and records it where a graph is in the making. Everything that depends on what tensors
// hold, rather than on their shapes, belongs into the call.
template <class Call>
void run(Call call) {
  {
    pybind11::gil_scoped_release release;
    call();
  }
  if (Graph::recording()) Graph::record(std::move(call));
}

Tensor copied(const Tensor& x) {
  TORCH_CHECK(!Graph::recording(), "a graph cannot hold the copy of a tensor that is not contiguous");
  return x.contiguous();
}

Tensor contiguous(const Tensor& x) { return x.is_contiguous() ? x : copied(x); }

Tensor rows_contiguous(const Tensor& x) { return x.dim() > 0 && x.stride(-1) != 1 ? copied(x) : x; }

#ifdef WITH_AMX
constexpr bool AMX = true;
#else
constexpr bool AMX = false;
#endif

// What K is padded to: the reach of one step of the kernel.
int64_t k_multiple(bool is_bf16) { return is_bf16 ? (AMX ? 32 : 2) : 1; }

int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// Asks for huge pages for memory that has just been allocated and not been written: a page walk for every 4 KiB of
// scattered KV blocks costs a decode's attention a tenth of its time. What the kernel cannot give stays as it was.
Tensor with_huge_pages(Tensor tensor) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t PAGE = 4096;
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  const uintptr_t first = (begin + PAGE - 1) / PAGE * PAGE, end = (begin + tensor.nbytes()) / PAGE * PAGE;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#endif
  return tensor;
}

// weight [N, K] contiguous to [panels, leaves, padded K / leaves, 16].
Tensor pack_linear(const Tensor& weight, int64_t leaves) {
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.is_contiguous(), "a weight is a contiguous [N, K] matrix");
  const int64_t n = weight.size(0), k = weight.size(1);
  TORCH_CHECK_VALUE(leaves >= 1 && k % leaves == 0, "K=", k, " does not split evenly into num_leaves=", leaves);
  LinearShape shape{0,      n, k / leaves, round_up(k / leaves, k_multiple(weight.scalar_type() == at::kBFloat16)),
                    leaves, 0};
  Tensor packed =
      with_huge_pages(at::empty({(n + PANEL - 1) / PANEL, leaves, shape.leaf_k_padded, PANEL}, weight.options()));
  by_type(weight, [&](auto zero) {
    using T = decltype(zero);
    pybind11::gil_scoped_release release;
    cpu_ops::pack_linear(data<const T>(weight), shape, data<T>(packed), threads());
  });
  return packed;
}

template <class T, class Y>
void multiply(const T* x, const T* packed, const float* bias, const LinearShape& shape, Y* y) {
  if constexpr (AMX && std::is_same_v<T, bf16>) {
    linear_amx(x, packed, bias, shape, y, threads());
  } else {
    linear_vector(x, packed, bias, shape, y, threads());
  }
}

// x [M, K] to [M, n] in x's type, or in float32.
Tensor linear(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t n, int64_t k,
              bool to_float) {
  TORCH_CHECK_VALUE(input.dim() == 2 && input.size(1) == k, "x is ", input.sizes(), "; the weight takes [M, ", k, "]");
  TORCH_CHECK_VALUE(input.scalar_type() == packed.scalar_type(), "x is ", input.scalar_type(), ", the weight is ",
                    packed.scalar_type());
  const Tensor x = rows_contiguous(input);
  const int64_t leaves = packed.size(1);
  const LinearShape shape{x.size(0), n, k / leaves, packed.size(2), leaves, x.stride(0)};
  Tensor y = at::empty({x.size(0), n}, to_float ? x.options().dtype(at::kFloat) : x.options());
  if (x.size(0) == 0) return y;
  const auto call = [&](auto zero, auto* out) {
    using T = decltype(zero);
    run([x, packed, bias, shape, y, out] {
      const float* const bias_data = bias ? data<const float>(*bias) : nullptr;
      multiply(data<const T>(x), data<const T>(packed), bias_data, shape, out);
    });
  };
  if (x.scalar_type() == at::kFloat) {
    call(float{}, data<float>(y));
  } else if (to_float) {
    call(bf16{}, data<float>(y));
  } else {
    call(bf16{}, data<bf16>(y));
  }
  return y;
}

Tensor embedding(const Tensor& ids, const Tensor& table) {
  TORCH_CHECK_VALUE(table.dim() == 2 && table.is_contiguous(),
                    "an embedding table is a contiguous [vocab, hidden] matrix");
  exactly<int64_t>(ids, "token_ids");
  Tensor out = at::empty({ids.numel(), table.size(1)}, table.options());
  run([=] {
    const int64_t* const index = data<const int64_t>(ids);
    for (int64_t i = 0; i < ids.numel(); i++) {
      const int64_t id = index[i];
      TORCH_CHECK_INDEX(id >= 0 && id < table.size(0), "token id ", id, " is outside 0 .. ", table.size(0) - 1);
    }
    const int64_t row_bytes = table.size(1) * table.element_size();
    gather_rows(table.data_ptr(), index, ids.numel(), row_bytes, out.data_ptr(), threads());
  });
  return out;
}

// x [..., n] of two or three dimensions, any strides but the last.
Tensor rms_norm(const Tensor& input, const Tensor& weight, double eps) {
  TORCH_CHECK_VALUE(input.dim() == 2 || input.dim() == 3, "rms_norm takes [M, N] or [M, H, N], not ", input.sizes());
  const Tensor x = rows_contiguous(input);
  Rows rows{x.size(0), 1, x.size(-1), x.stride(0), 0};
  if (x.dim() == 3) rows.inner = x.size(1), rows.inner_stride = x.stride(1);
  TORCH_CHECK_VALUE(weight.numel() == rows.n, "the norm weight has ", weight.numel(), " elements, x has ", rows.n);
  Tensor out = at::empty(x.sizes(), x.options());
  by_type(x, [&](auto zero) {
    using T = decltype(zero);
    run([=] {
      cpu_ops::rms_norm(data<const T>(x), rows, data<const T>(weight), static_cast<float>(eps), data<T>(out),
                        threads());
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& input, const Tensor& residual_input, const Tensor& weight,
                                        double eps) {
  const Tensor x = contiguous(input), residual = contiguous(residual_input);
  TORCH_CHECK_VALUE(x.dim() == 2 && x.sizes() == residual.sizes() && weight.numel() == x.size(1), "x is ", x.sizes(),
                    ", the residual ", residual.sizes(), ", the norm weight ", weight.sizes());
  Tensor out = at::empty(x.sizes(), x.options()), sum = at::empty(x.sizes(), x.options());
  by_type(x, [&](auto zero) {
    using T = decltype(zero);
    run([=] {
      cpu_ops::add_rms_norm(data<const T>(x), data<const T>(residual), x.size(0), x.size(1), data<const T>(weight),
                            static_cast<float>(eps), data<T>(out), data<T>(sum), threads());
    });
  });
  return {out, sum};
}

Tensor silu_mul(const Tensor& input) {
  const Tensor x = contiguous(input);
  TORCH_CHECK_VALUE(x.dim() == 2 && x.size(1) % 2 == 0, "silu_mul takes [M, 2 F], not ", x.sizes());
  Tensor out = at::empty({x.size(0), x.size(1) / 2}, x.options());
  by_type(x, [&](auto zero) {
    using T = decltype(zero);
    run([=] { cpu_ops::silu_mul(data<const T>(x), x.size(0), x.size(1) / 2, data<T>(out), threads()); });
  });
  return out;
}

KvLayout kv_layout(int64_t block_size, int64_t num_kv_heads, int64_t head_dim, bool is_bf16) {
  TORCH_CHECK_VALUE(block_size >= PANEL && block_size % PANEL == 0, "block_size=", block_size,
                    " is not a multiple of 16, the keys of a tile of the CPU ops; choose 16, 32, ...");
  TORCH_CHECK_VALUE(head_dim >= PANEL && head_dim % PANEL == 0 && head_dim <= MAX_HEAD_DIM, "head_dim=", head_dim,
                    " is not a multiple of 16 up to ", MAX_HEAD_DIM, ", which the CPU ops need; use ops=\"reference\"");
  return {num_kv_heads, head_dim, round_up(head_dim, k_multiple(is_bf16)), block_size / PANEL};
}

int64_t kv_block_elements(int64_t block_size, int64_t num_kv_heads, int64_t head_dim, bool is_bf16) {
  return kv_layout(block_size, num_kv_heads, head_dim, is_bf16).block_size();
}

HeadRows head_rows(const Tensor& x) { return {x.size(1), x.stride(0), x.stride(1)}; }

Tensor rope_and_store(const Tensor& q_input, const Tensor& k_input, const Tensor& v_input, const Tensor& rope,
                      const Tensor& positions, const Tensor& slots, const Tensor& kv, int64_t block_size) {
  const Tensor q = rows_contiguous(q_input), k = rows_contiguous(k_input), v = rows_contiguous(v_input);
  const KvLayout layout = kv_layout(block_size, k.size(1), k.size(2), kv.scalar_type() == at::kBFloat16);
  TORCH_CHECK_VALUE(q.size(2) == k.size(2) && k.sizes() == v.sizes() && rope.size(1) == k.size(2), "q is ", q.sizes(),
                    ", k ", k.sizes(), ", v ", v.sizes(), ", the rope table ", rope.sizes());
  exactly<float>(rope, "rope"), exactly<int64_t>(positions, "positions"), exactly<int64_t>(slots, "slots");
  Tensor out = at::empty(q.sizes(), q.options());
  by_type(q, [&](auto zero) {
    using T = decltype(zero);
    run([=] {
      cpu_ops::rope_and_store(data<const T>(q), head_rows(q), data<const T>(k), head_rows(k), data<const T>(v),
                              head_rows(v), q.size(0), data<const float>(rope), data<const int64_t>(positions),
                              data<const int64_t>(slots), data<T>(kv), layout, data<T>(out), threads());
    });
  });
  return out;
}

Tensor paged_attention(const Tensor& q_input, const Tensor& kv, int64_t block_size, int64_t num_kv_heads,
                       const Tensor& query_start, const Tensor& context_lens, const Tensor& block_tables,
                       double scale) {
  const Tensor q = contiguous(q_input);
  const KvLayout layout = kv_layout(block_size, num_kv_heads, q.size(2), kv.scalar_type() == at::kBFloat16);
  TORCH_CHECK_VALUE(q.size(1) % num_kv_heads == 0, q.size(1), " query heads do not divide over ", num_kv_heads,
                    " KV heads");
  exactly<int64_t>(query_start, "query_start"), exactly<int64_t>(context_lens, "context_lens");
  exactly<int32_t>(block_tables, "block_tables");
  Tensor out = at::empty({q.size(0), q.size(1) * q.size(2)}, q.options());
  by_type(q, [&](auto zero) {
    using T = decltype(zero);
    run([=] {
      const AttentionBatch batch{data<const int64_t>(query_start),
                                 data<const int64_t>(context_lens),
                                 data<const int32_t>(block_tables),
                                 context_lens.numel(),
                                 block_tables.stride(0),
                                 q.size(1),
                                 static_cast<float>(scale)};
      if constexpr (AMX && std::is_same_v<T, bf16>) {
        attention_amx(data<const T>(q), data<const T>(kv), layout, batch, data<T>(out), threads());
      } else {
        attention_vector(data<const T>(q), data<const T>(kv), layout, batch, data<T>(out), threads());
      }
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> greedy(const Tensor& input) {
  const Tensor logits = contiguous(input);
  exactly<float>(logits, "logits");
  Tensor ids = at::empty({logits.size(0)}, logits.options().dtype(at::kLong));
  Tensor logprobs = at::empty({logits.size(0)}, logits.options());
  run([=] {
    cpu_ops::greedy(data<const float>(logits), logits.size(0), logits.size(1), data<int64_t>(ids),
                    data<float>(logprobs), threads());
  });
  return {ids, logprobs};
}

Tensor logprobs_of(const Tensor& input, const Tensor& ids_input) {
  const Tensor logits = contiguous(input), ids = contiguous(ids_input);
  exactly<float>(logits, "logits");
  exactly<int64_t>(ids, "token_ids");
  Tensor logprobs = at::empty({logits.size(0)}, logits.options());
  run([=] {
    cpu_ops::logprobs_of(data<const float>(logits), logits.size(0), logits.size(1), data<const int64_t>(ids),
                         data<float>(logprobs), threads());
  });
  return logprobs;
}

}  // namespace
}  // namespace cpu_ops::bindings

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using cpu_ops::bindings::Graph;
  pybind11::class_<Graph>(m, "Graph")
      .def(pybind11::init<>())
      .def("__enter__", &Graph::enter)
      .def("__exit__", &Graph::exit)
      .def("replay", &Graph::replay);
  m.def("pack_linear", &cpu_ops::bindings::pack_linear);
  m.def("linear", &cpu_ops::bindings::linear);
  m.def("embedding", &cpu_ops::bindings::embedding);
  m.def("rms_norm", &cpu_ops::bindings::rms_norm);
  m.def("add_rms_norm", &cpu_ops::bindings::add_rms_norm);
  m.def("silu_mul", &cpu_ops::bindings::silu_mul);
  m.def("with_huge_pages", &cpu_ops::bindings::with_huge_pages);
  m.def("kv_block_elements", &cpu_ops::bindings::kv_block_elements);
  m.def("rope_and_store", &cpu_ops::bindings::rope_and_store);
  m.def("paged_attention", &cpu_ops::bindings::paged_attention);
  m.def("greedy", &cpu_ops::bindings::greedy);
  m.def("logprobs_of", &cpu_ops::bindings::logprobs_of);
}
