// All layers of a decoder in one call: the kernels one after another, by threads that stay together.
//
// Called one by one from Python, the some three hundred operations of a step cost more than they compute where there
// are few tokens. program.py writes the list of operations once for a model; each is the same kernel as in kernels.cpp,
// so the results have the same bits.

#include <ATen/Parallel.h>
#include <omp.h>
#include <sched.h>

#include <atomic>

#include "attention.h"
#include "int8.h"
#include "linear.h"
#include "small.h"

namespace hibachi {

enum Kind : int32_t { RMS_NORM, LINEAR, ROPE, WRITE, ATTEND, ACTIVATE, TAKE, ROUND, LINEAR_INT8, LAYER_NORM };

// As in structs.py. A buffer holds a row for each token, or for each token whose output is wanted.
struct Op {
  int32_t kind, outputs;         // outputs: over the latter
  int32_t from, to, added;       // buffers; added -1: none
  int32_t which, gated;          // layer, rotary frequencies or activation; gated: of activations
  int32_t groups;                // pieces of a row
  int64_t from_at, to_at, n, k;  // first elements in a row; columns out and in, or width of a piece and elements of it
  int64_t window;
  float scale, number;  // number: of a norm its epsilon, of attention its softcap
  const void *w, *b;
  const float* scales;  // of bytes
};

// As in structs.py.
struct Step {
  int64_t tokens, outputs, rows, blocks, block_size, heads, kv_heads, head_dim, cascade;
  const int32_t *slot, *pos, *cu_q, *table, *last;
  void* const* buffers;
  const int64_t* widths;     // elements of a row of each buffer
  const void* const* turns;  // cosines and sines [tokens, half] of each set of frequencies
  void* const* caches;       // keys and values of each layer
  double* seconds;           // of each operation, added up; or nullptr
};

// Threads that wait for each other after each operation. Waiting is busy, as it takes less than a microsecond, unless
// somebody else has the processor.
class Team {
 public:
  explicit Team(int operations) : taken(operations) {}

  void assemble(int threads) { size = threads; }

  void wait() {
    if (size == 1) return;
    const int now = turn.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived.store(0, std::memory_order_relaxed);
      turn.store(now + 1, std::memory_order_release);
      return;
    }
    for (int n = 0; turn.load(std::memory_order_acquire) == now; n++) {
      if (n > 20000) sched_yield();
#ifdef __x86_64__
      else __builtin_ia32_pause();
#endif
    }
  }

  template <class K>
  void share(int operation, const K& kernel) {
    const int64_t n = kernel.count(), batch = kernel.batch(size);
    for (int64_t i; (i = taken[operation].fetch_add(batch, std::memory_order_relaxed)) < n;)
      for (int64_t end = std::min(i + batch, n); i < end; i++) kernel(i);
  }

 private:
  int size = 1;
  std::atomic<int> arrived{0}, turn{0};
  std::vector<std::atomic<int64_t>> taken;
};

// Rows `last` of x.
template <class E>
struct Take {
  const E* x;
  E* y;
  int64_t width, rows;
  const int32_t* last;

  int64_t count() const { return rows; }
  int64_t batch(int) const { return 16; }
  void operator()(int64_t i) const { std::copy_n(x + last[i] * width, width, y + i * width); }
};

template <class T>
static void run(
    const Step& s, const Op& op, int i, const std::vector<Tile>& work, const std::vector<Set>& some, Team& team
) {
  using E = typename T::Element;
  using Lane = typename T::Lane;
  const int64_t m = op.outputs ? s.outputs : s.tokens, from_width = s.widths[op.from], to_width = s.widths[op.to];
  E *from = static_cast<E*>(s.buffers[op.from]) + op.from_at, *to = static_cast<E*>(s.buffers[op.to]) + op.to_at;
  const E *w = static_cast<const E*>(op.w), *b = static_cast<const E*>(op.b);
  const E* added = op.added < 0 ? nullptr : static_cast<const E*>(s.buffers[op.added]);
  const int64_t added_width = op.added < 0 ? 0 : s.widths[op.added];
  const Pieces<const E> x{.data = from, .stride = from_width, .groups = op.groups, .width = op.n};
  const Pieces<E> y{.data = to, .stride = to_width, .groups = op.groups, .width = op.n};
  Sizes sizes{};
  E *keys = nullptr, *values = nullptr;
  if (op.kind == WRITE || op.kind == ATTEND) {
    keys = static_cast<E*>(s.caches[2 * op.which]);
    values = static_cast<E*>(s.caches[2 * op.which + 1]);
    sizes = {
        .tokens = s.tokens,
        .rows = s.rows,
        .heads = s.heads,
        .kv_heads = s.kv_heads,
        .k_dim = s.head_dim,
        .v_dim = s.head_dim,
        .blocks = s.blocks,
        .block_size = s.block_size,
        .q_stride = from_width,
        .k_stride = from_width,
        .v_stride = from_width,
        .window = op.window,
        .scale = op.scale,
        .softcap = op.number,
    };
  }
  switch (op.kind) {
    case RMS_NORM:
      return team.share(
          i,
          RmsNorm<T>{
              .x = x,
              .w = w,
              .y = y,
              .rows = m,
              .dim = op.n,
              .eps = op.number,
              .added = added,
              .added_stride = added_width,
          }
      );
    case LAYER_NORM:
      return team.share(
          i,
          LayerNorm<T>{
              .x = x,
              .w = w,
              .b = b,
              .y = y,
              .rows = m,
              .dim = op.n,
              .eps = op.number,
              .added = added,
              .added_stride = added_width,
          }
      );
    case LINEAR:
      return team.share(
          i,
          Linear<T, T>{
              .x = from,
              .x_stride = from_width,
              .w = reinterpret_cast<const Lane*>(w),
              .bias = b,
              .y = to,
              .y_stride = to_width,
              .m = m,
              .n = op.n,
              .k = op.k,
              .scale = op.scale,
              .added = added,
              .added_stride = added_width,
          }
      );
    case ROPE: {
      const void* const* turns = s.turns + 2 * op.which;
      const E *cos = static_cast<const E*>(turns[0]), *sin = static_cast<const E*>(turns[1]);
      return team.share(i, Rope<T>{.x = x, .cos = cos, .sin = sin, .y = y, .tokens = m, .half = op.k});
    }
    case WRITE: {
      const E *k = from + s.heads * s.head_dim, *v = k + s.kv_heads * s.head_dim;
      return team.share(
          i,
          Write<T>{.s = sizes, .at = Layout<T>(sizes), .k = k, .v = v, .keys = keys, .values = values, .slot = s.slot}
      );
    }
    case ATTEND: {
      const Attention<T> attention{
          .s = sizes,
          .at = Layout<T>(sizes),
          .q = from,
          .keys = keys,
          .values = values,
          .pos = s.pos,
          .table = s.table,
          .out = to,
          .work = work,
      };
      return s.cascade ? team.share(i, Cascade<T>{attention, some}) : team.share(i, attention);
    }
    case ACTIVATE:
      return team.share(
          i,
          Activate<T>{
              .which = Activation(op.which),
              .gated = bool(op.gated),
              .x = from,
              .x_stride = from_width,
              .y = to,
              .y_stride = to_width,
              .rows = m,
              .dim = op.n,
          }
      );
    case ROUND: {
      const int8::Rounded rounded(s.buffers[op.to], m, op.k);
      return team.share(i, int8::Round<T>{.x = from, .x_stride = from_width, .rounded = rounded, .m = m, .k = op.k});
    }
    case LINEAR_INT8:
      return team.share(
          i,
          int8::Linear<T, T>{
              .x = int8::Rounded(s.buffers[op.from], m, op.k),
              .w = static_cast<const uint32_t*>(op.w),
              .scales = op.scales,
              .bias = b,
              .y = to,
              .y_stride = to_width,
              .m = m,
              .n = op.n,
              .k = op.k,
              .scale = op.scale,
              .added = added,
              .added_stride = added_width,
          }
      );
    case TAKE:
      return team.share(i, Take<E>{.x = from, .y = to, .width = from_width, .rows = s.outputs, .last = s.last});
  }
}

template <class T>
static void step(const Step& s, const Op* ops, int64_t count) {
  using E = typename T::Element;
  Team team(count);
  Sizes sizes{};
  sizes.rows = s.rows, sizes.heads = s.heads, sizes.kv_heads = s.kv_heads;
  sizes.blocks = s.blocks, sizes.block_size = s.block_size;
  std::vector<Tile> work;
  std::vector<Set> some;
  if (s.cascade) some = sets(sizes, s.cu_q, s.pos, s.table, at::get_num_threads(), work);
  else work = tiles(sizes, s.cu_q);
  for (int64_t i = 0, done = s.cu_q[s.rows]; i < count; i++)  // tokens after that are padding
    if (ops[i].kind == ATTEND) {
      const int64_t width = s.widths[ops[i].to];
      std::fill_n(static_cast<E*>(s.buffers[ops[i].to]) + done * width, (s.tokens - done) * width, E{});
    }
#pragma omp parallel num_threads(at::get_num_threads())
  {
#pragma omp single
    team.assemble(omp_get_num_threads());
    double began = s.seconds ? omp_get_wtime() : 0;
    for (int64_t i = 0; i < count; i++) {
      run<T>(s, ops[i], i, work, some, team);
      team.wait();
      if (s.seconds && omp_get_thread_num() == 0) {
        const double now = omp_get_wtime();
        s.seconds[i] += now - began;
        began = now;
      }
    }
  }
}

}  // namespace hibachi

using namespace hibachi;

extern "C" {

int64_t hibachi_sizeof_Op() { return sizeof(Op); }
int64_t hibachi_sizeof_Step() { return sizeof(Step); }

void hibachi_step_f32(const Step* s, const Op* ops, int64_t count) { step<F32>(*s, ops, count); }
void hibachi_step_bf16(const Step* s, const Op* ops, int64_t count) { step<Bf16>(*s, ops, count); }
}
