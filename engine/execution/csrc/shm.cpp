// Exchanges between the ranks of one host through shared memory.
//
//   seats   one cache line a rank: how many rounds it has published
//   slots   two a rank, used in turn: what it published last, and what others may still be reading
//
// An exchange is one or more rounds. In a round every rank writes its slot, publishes, waits until all have published,
// and reads the others' slots. Whoever has seen everybody's round R knows that nobody reads round R - 1 any more, so the
// slot of round R + 1, which is that of R - 1, is free to write. What exceeds a slot goes in several rounds.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <linux/futex.h>
#include <pybind11/numpy.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <ctime>
#include <optional>
#include <system_error>
#include <vector>

namespace {

namespace py = pybind11;
using Clock = std::chrono::steady_clock;

constexpr int SPINS = 2000;                             // pauses before giving the core away: some tens of microseconds
constexpr auto YIELDING = std::chrono::milliseconds(2);  // ... and how long before sleeping
constexpr long CHECK_NANOSECONDS = 50'000'000;          // between two looks at whether the others live
constexpr int64_t PAGE = 4096;
constexpr int64_t BLOCK = 1024;  // floats added at once: intermediate sums stay in the first-level cache
constexpr int64_t ADD = -1;      // as in engine/ops/tree.py

struct alignas(64) Seat {
  std::atomic<uint32_t> round;
  std::atomic<uint32_t> sleepers;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

int64_t seats_bytes(int64_t size) { return (size * static_cast<int64_t>(sizeof(Seat)) + PAGE - 1) / PAGE * PAGE; }

int64_t memory_bytes(int64_t size, int64_t slot_bytes) { return seats_bytes(size) + 2 * size * slot_bytes; }

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Group {
 public:
  Group(int fd, int64_t rank, int64_t size, int64_t slot_bytes, py::function check)
      : rank_(rank), size_(size), slot_bytes_(slot_bytes), check_(std::move(check)) {
    void* const memory = mmap(nullptr, memory_bytes(size, slot_bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of the ranks' memory");
    memory_ = static_cast<char*>(memory);
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group() { close(); }

  void close() {
    if (memory_ != nullptr) munmap(memory_, memory_bytes(size_, slot_bytes_));
    memory_ = nullptr;
  }

  double seconds() const { return std::chrono::duration<double>(time_).count(); }

  // counts[r] parts of rank r, all of one shape, added as `order` says.
  at::Tensor add(const std::vector<at::Tensor>& parts, const std::vector<int64_t>& counts,
                 const std::vector<int64_t>& order) {
    const Timer timer(*this);
    TORCH_CHECK_VALUE(static_cast<int64_t>(parts.size()) == counts.at(rank_), "rank ", rank_, " has ", counts.at(rank_),
                      " parts, not ", parts.size());
    for (const at::Tensor& part : parts)
      TORCH_CHECK_VALUE(part.scalar_type() == at::kFloat && part.is_contiguous() && part.sizes() == parts[0].sizes(),
                        "parts are contiguous float32 of one shape");
    at::Tensor out = at::empty(parts[0].sizes(), parts[0].options());
    const int64_t count = out.numel();
    const int64_t at_once = slot_floats() / *std::max_element(counts.begin(), counts.end());
    sums_.resize(order.size() * BLOCK);
    py::gil_scoped_release release;
    for (int64_t first = 0; first < count; first += at_once) {
      const int64_t n = std::min(at_once, count - first);
      float* to = begin_round<float>();
      for (const at::Tensor& part : parts) to = std::copy_n(floats(part) + first, n, to);
      publish_and_wait();
      std::vector<const float*> from;
      for (int64_t r = 0; r < size_; r++)
        for (int64_t i = 0; i < counts[r]; i++) from.push_back(slot<const float>(r) + i * n);
      for (int64_t i = 0; i < n; i += BLOCK)
        add_block(from, order, i, std::min(BLOCK, n - i), out.data_ptr<float>() + first);
    }
    return out;
  }

  // Rank r's [M, widths[r]] side by side on rank 0, [M, 0] elsewhere.
  at::Tensor gather(const at::Tensor& columns, const std::vector<int64_t>& widths) {
    const Timer timer(*this);
    TORCH_CHECK_VALUE(columns.scalar_type() == at::kFloat && columns.is_contiguous() && columns.dim() == 2 &&
                          columns.size(1) == widths.at(rank_),
                      "columns are contiguous float32 [M, ", widths.at(rank_), "], not ", columns.sizes());
    const int64_t rows = columns.size(0);
    int64_t total = 0, widest = 0;
    for (int64_t r = 0; r < size_; r++) {
      total += widths[r];
      if (r != 0) widest = std::max(widest, widths[r]);
    }
    at::Tensor out = at::empty({rows, rank_ == 0 ? total : 0}, columns.options());
    py::gil_scoped_release release;
    if (rank_ == 0) place(floats(columns), 0, rows * widths[0], widths[0], out, 0);
    for (int64_t first = 0; first < rows * widest; first += slot_floats()) {
      const auto piece = [&](int64_t r) {  // how much of rank r's part this round carries
        return std::clamp<int64_t>(rows * widths[r] - first, 0, slot_floats());
      };
      float* const to = begin_round<float>();
      if (rank_ != 0) std::copy_n(floats(columns) + first, piece(rank_), to);
      publish_and_wait();
      if (rank_ != 0) continue;
      for (int64_t r = 1, column = widths[0]; r < size_; column += widths[r++])
        place(slot<const float>(r), first, piece(r), widths[r], out, column);
    }
    return out;
  }

  // Rank 0's message on every rank. A slot holds the message's length and a piece of it.
  py::array_t<int64_t> broadcast(const std::optional<py::array_t<int64_t, py::array::c_style>>& message) {
    const Timer timer(*this);
    TORCH_CHECK_VALUE(message.has_value() == (rank_ == 0), "rank 0 alone has a message");
    const int64_t at_once = slot_bytes_ / static_cast<int64_t>(sizeof(int64_t)) - 1;
    int64_t length = message ? message->size() : 0;
    const int64_t* const from = message ? message->data() : nullptr;
    std::vector<int64_t> received;
    {
      py::gil_scoped_release release;
      int64_t first = 0;
      do {
        int64_t* const to = begin_round<int64_t>();
        if (rank_ == 0) {
          to[0] = length;
          std::copy_n(from + first, std::min(at_once, length - first), to + 1);
        }
        publish_and_wait();
        if (rank_ != 0) {
          const int64_t* const arrived = slot<const int64_t>(0);
          length = arrived[0];
          received.insert(received.end(), arrived + 1, arrived + 1 + std::min(at_once, length - first));
        }
        first += at_once;
      } while (first < length);
    }
    return message ? py::array_t<int64_t>(*message) : py::array_t<int64_t>(length, received.data());
  }

 private:
  struct Timer {
    explicit Timer(Group& group) : group(group), start(Clock::now()) {
      TORCH_CHECK(group.memory_ != nullptr, "the group of ranks is closed");
    }
    ~Timer() { group.time_ += Clock::now() - start; }
    Group& group;
    Clock::time_point start;
  };

  static const float* floats(const at::Tensor& tensor) { return tensor.data_ptr<float>(); }

  int64_t slot_floats() const { return slot_bytes_ / static_cast<int64_t>(sizeof(float)); }

  Seat& seat(int64_t r) const { return reinterpret_cast<Seat*>(memory_)[r]; }

  // Rank r's slot of this round.
  template <class T>
  T* slot(int64_t r) const {
    return reinterpret_cast<T*>(memory_ + seats_bytes(size_) + (2 * r + round_ % 2) * slot_bytes_);
  }

  // The slot to write in a new round: this rank has read all it wants of the last one.
  template <class T>
  T* begin_round() {
    round_++;
    return slot<T>(rank_);
  }

  void publish_and_wait() {
    Seat& mine = seat(rank_);
    mine.round.store(round_);
    if (mine.sleepers.load() != 0)
      syscall(SYS_futex, &mine.round, FUTEX_WAKE, size_, nullptr, nullptr, 0);
    for (int64_t r = 0; r < size_; r++) wait_for(seat(r));
  }

  void wait_for(Seat& other) {
    const auto arrived = [&](uint32_t round) { return static_cast<int32_t>(round - round_) >= 0; };
    const auto ready = [&] { return arrived(other.round.load(std::memory_order_acquire)); };
    for (int i = 0; i < SPINS; i++) {
      if (ready()) return;
      relax();
    }
    for (const auto end = Clock::now() + YIELDING; Clock::now() < end;) {
      if (ready()) return;
      sched_yield();
    }
    while (!ready()) {
      other.sleepers++;  // before the look at the round: the publisher stores its round before it looks at the sleepers
      const uint32_t seen = other.round.load();
      const timespec timeout{0, CHECK_NANOSECONDS};
      if (!arrived(seen)) syscall(SYS_futex, &other.round, FUTEX_WAIT, seen, &timeout, nullptr, 0);
      other.sleepers--;
      if (!ready()) check();
    }
  }

  void check() {
    const py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    check_();
  }

  // Elements [first, first + count) of a row-major [M, width] matrix, to columns `column` .. of `out`.
  static void place(const float* from, int64_t first, int64_t count, int64_t width, at::Tensor& out, int64_t column) {
    const int64_t stride = out.size(1);
    float* const to = out.data_ptr<float>() + column;
    for (int64_t i = first; i < first + count;) {
      const int64_t row = i / width, n = std::min((row + 1) * width, first + count) - i;
      std::copy_n(from + (i - first), n, to + row * stride + i % width);
      i += n;
    }
  }

  // Elements [i, i + n) of every part, added on a stack.
  void add_block(const std::vector<const float*>& parts, const std::vector<int64_t>& order, int64_t i, int64_t n,
                 float* out) {
    std::vector<const float*>& stack = stack_;
    stack.clear();
    float* free = sums_.data();
    for (const int64_t item : order) {
      if (item != ADD) {
        stack.push_back(parts[item] + i);
        continue;
      }
      const float* const right = stack.back();
      stack.pop_back();
      const float* const left = stack.back();
      for (int64_t j = 0; j < n; j++) free[j] = left[j] + right[j];
      stack.back() = free;
      free += BLOCK;
    }
    std::copy_n(stack.back(), n, out + i);
  }

  int64_t rank_, size_, slot_bytes_;
  py::function check_;
  char* memory_ = nullptr;
  uint32_t round_ = 0;
  Clock::duration time_{};
  std::vector<float> sums_;
  std::vector<const float*> stack_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("memory_bytes", &memory_bytes);
  py::class_<Group>(m, "Group")
      .def(py::init<int, int64_t, int64_t, int64_t, py::function>())
      .def("add", &Group::add)
      .def("gather", &Group::gather)
      .def("broadcast", &Group::broadcast)
      .def("seconds", &Group::seconds)
      .def("close", &Group::close);
}
