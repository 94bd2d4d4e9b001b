// A decoder in one call, from token ids to logits: the kernels one after another, as one job of the team.
//
// Called one by one from Python, the some three hundred operations of a step cost more than they compute where there
// are few tokens. program.py writes the list of operations once for a model; each is the same kernel as in
// operations.cpp, so the results have the same bits.

#include "api.h"
#include "attention.h"
#include "blocks.h"
#include "experts.h"
#include "int8.h"
#include "linear.h"
#include "small.h"
#include "team.h"

namespace hibachi {

enum Kind : int32_t {
  RMS_NORM,
  LINEAR,
  ROPE,
  WRITE,
  ATTEND,
  ACTIVATE,
  TAKE,
  ROUND,
  LINEAR_INT8,
  LAYER_NORM,
  ROUTE,
  SORT,
  GATHER,
  MIX,
  LINEAR_Q4_0,
  LINEAR_Q8_0,
  EMBED,
  ADD,
};

// As in structs.py. A buffer holds a row for each token, or for each token whose output is wanted.
struct Op {
  int32_t kind, outputs;          // outputs: over the latter
  int32_t from, to, added;        // buffers; added -1: none
  int32_t which, gated;           // layer, rotary frequencies, activation or kind of panels; gated: of activations
  int32_t groups;                 // pieces of a row; of a mixture of experts, those of a token
  int64_t from_at, to_at, n, k;   // first elements in a row; columns out and in, or width of a piece and elements of it
  int64_t window, experts, wide;  // experts: 0 if it is none of theirs; wide: a product's results are float32
  int64_t leaves, leaf;           // into which a product is cut; which of them: of experts
  float scale, number;            // number: of a norm its epsilon, of attention its softcap
  const void *w, *b;              // w: of experts, their matrices
  const void* scales;             // of bytes; of experts, theirs
};

// As in structs.py.
struct Step {
  int64_t tokens, outputs, rows, blocks, block_size, cache_blocks, heads, kv_heads, head_dim, cascade;
  int64_t positions, vocabulary;  // of the tables of angles; of the embedding
  const int32_t* index;           // one behind the other: tok, slot, pos, cu_q, table and last of the step
  void* const* buffers;
  const int64_t* widths;     // elements of a row of each buffer
  const void* const* turns;  // cosines and sines [positions, half] of each set of frequencies
  void* const* caches;       // keys and values of each layer
  double* seconds;           // of each operation, added up; or nullptr

  const int32_t* tok() const { return index; }
  const int32_t* slot() const { return tok() + tokens; }
  const int32_t* pos() const { return slot() + tokens; }
  const int32_t* cu_q() const { return pos() + tokens; }
  const int32_t* table() const { return cu_q() + rows + 1; }
  const int32_t* last() const { return table() + rows * blocks; }
};

// `Rope` with the angles of all positions.
template <class T>
struct Turn {
  Rope<T> rope;
  const int32_t* pos;

  int64_t count() const { return rope.count(); }
  int64_t batch(int threads) const { return rope.batch(threads); }
  void operator()(int64_t t) const {
    Rope<T> one = rope;
    one.x.data += t * one.x.stride, one.y.data += t * one.y.stride;
    one.cos += pos[t] * one.half, one.sin += pos[t] * one.half;
    one(0);
  }
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

// What is left of a product whose sums come from several processes: as the end of `Linear::part`.
template <class T>
struct Add {
  using Element = typename T::Element;

  const float* sums;            // [rows, n]
  const Element *bias, *added;  // or nullptr
  Element* y;
  int64_t rows, n;
  float scale;

  int64_t count() const { return rows; }
  int64_t batch(int) const { return 4; }
  void operator()(int64_t i) const {
    for (int64_t at = 0; at < n; at += LANES) {
      const int some = std::min<int64_t>(LANES, n - at);
      Floats v = read_some<F32>(sums + i * n + at, some);
      if (bias) v += read_some<T>(bias + at, some);
      if (scale != 1.0f) v = T::rounded(v) * scale;
      if (added) v = T::rounded(v) + read_some<T>(added + i * n + at, some);
      write_some<T>(y + i * n + at, v, some);
    }
  }
};

// The panels of a product.
static int panels_of(const Op& op) {
  switch (op.kind) {
    case LINEAR_INT8: return INT8;
    case LINEAR_Q4_0: return Q4_0;
    case LINEAR_Q8_0: return Q8_0;
    default: return FLOAT32;
  }
}

// f(the kernel of an operation).
template <class T, class F>
static auto with_kernel(const Step& s, const Op& op, const Work& work, const F& f) {
  using E = typename T::Element;
  const int64_t m = op.outputs ? s.outputs : s.tokens, from_width = s.widths[op.from], to_width = s.widths[op.to];
  E *from = static_cast<E*>(s.buffers[op.from]) + op.from_at, *to = static_cast<E*>(s.buffers[op.to]) + op.to_at;
  const E *w = static_cast<const E*>(op.w), *b = static_cast<const E*>(op.b);
  const E* added = op.added < 0 ? nullptr : static_cast<const E*>(s.buffers[op.added]);
  const int64_t added_width = op.added < 0 ? 0 : s.widths[op.added];
  const Pieces<const E> x{.data = from, .stride = from_width, .groups = op.groups, .width = op.n};
  const Pieces<E> y{.data = to, .stride = to_width, .groups = op.groups, .width = op.n};
  const int64_t many = m * op.groups;  // pieces
  const Lists lists(op.experts ? s.buffers[op.which] : nullptr, m, op.groups, op.experts);
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
      return f(
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
      return f(
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
    case LINEAR_INT8:
    case LINEAR_Q4_0:
    case LINEAR_Q8_0:
      return with_factors<T>(panels_of(op), [&](auto type) {
        using X = typename decltype(type)::type;
        const X factors(from, from_width / op.groups, many, op.k);
        const auto run = [&]<class L>(const L& product) {
          if (!op.experts) return f(product.of(0, many, op.w, static_cast<const float*>(op.scales)));
          const auto* ws = static_cast<const void* const*>(op.w);
          return f(OfExperts<L>{lists, product, ws, static_cast<const float* const*>(op.scales)});
        };
        if (op.wide)
          return run(
              Linear<T, F32, X>{
                  .factors = factors,
                  .bias = b,
                  .y = static_cast<float*>(s.buffers[op.to]),
                  .y_stride = to_width / op.groups,
                  .m = many,
                  .n = op.n,
                  .k = op.k,
                  .leaves = op.leaves,
                  .leaf = op.experts ? op.leaf : -1,
              }
          );
        return run(
            Linear<T, T, X>{
                .factors = factors,
                .bias = b,
                .y = to,
                .y_stride = to_width / op.groups,
                .m = many,
                .n = op.n,
                .k = op.k,
                .scale = op.scale,
                .added = added,
                .added_stride = added_width,
                .leaves = op.leaves,
            }
        );
      });
    case ROPE: {
      const void* const* turns = s.turns + 2 * op.which;
      const E *cos = static_cast<const E*>(turns[0]), *sin = static_cast<const E*>(turns[1]);
      return f(Turn<T>{{.x = x, .cos = cos, .sin = sin, .y = y, .tokens = m, .half = op.k}, s.pos()});
    }
    case WRITE: {
      const E *k = from + s.heads * s.head_dim, *v = k + s.kv_heads * s.head_dim;
      return f(
          Write<T>{.s = sizes, .at = Layout<T>(sizes), .k = k, .v = v, .keys = keys, .values = values, .slot = s.slot()}
      );
    }
    case ATTEND: {
      return f(
          Attention<T>{
              .s = sizes,
              .at = Layout<T>(sizes),
              .q = from,
              .keys = keys,
              .values = values,
              .pos = s.pos(),
              .table = s.table(),
              .out = to,
              .work = work,
          }
      );
    }
    case ACTIVATE:
      return f(
          Activate<T>{
              .which = Activation(op.which),
              .gated = bool(op.gated),
              .x = from,
              .x_stride = from_width / op.groups,
              .y = to,
              .y_stride = to_width / op.groups,
              .rows = many,
              .dim = op.n,
          }
      );
    case ROUND: {
      const int8::Rounded rounded(s.buffers[op.to], many, op.k);
      return f(int8::Round<T>{.x = from, .x_stride = from_width / op.groups, .rounded = rounded, .m = many, .k = op.k});
    }
    case EMBED: {
      const auto* lanes = static_cast<const uint32_t*>(op.w);
      const auto* bytes = static_cast<const uint8_t*>(op.w);
      switch (op.which) {
        case INT8: return f(int8::Rows<T>{bytes, static_cast<const float*>(op.scales), s.tok(), to, m, op.n});
        case Q4_0: return f(blocks::Rows<T, blocks::Four>{lanes, s.tok(), to, m, op.n});
        case Q8_0: return f(blocks::Rows<T, blocks::Eight>{lanes, s.tok(), to, m, op.n});
        default: return f(Rows<T>{w, s.tok(), to, m, op.n});
      }
    }
    case ADD:
      return f(
          Add<T>{
              .sums = static_cast<const float*>(s.buffers[op.from]),
              .bias = b,
              .added = added,
              .y = to,
              .rows = m,
              .n = op.n,
              .scale = op.scale,
          }
      );
    case ROUTE:
      return f(
          Route<T>{
              .x = from,
              .x_stride = from_width,
              .tokens = m,
              .each = op.groups,
              .experts = op.experts,
              .normalised = bool(op.gated),
              .weights = lists.weights,
              .chosen = lists.chosen,
          }
      );
    case SORT: return f(Sort{lists});
    case GATHER: return f(Gather<E>{.lists = lists, .x = from, .x_stride = from_width, .y = to, .dim = op.n});
    case MIX:
      if (op.wide) {
        auto *parts = static_cast<float*>(s.buffers[op.from]), *sums = static_cast<float*>(s.buffers[op.to]);
        return f(MixLeaf{lists, parts, sums, op.n, op.leaf, op.leaves});
      }
      return f(
          Mix<T>{
              .lists = lists,
              .x = from,
              .y = to,
              .y_stride = to_width,
              .dim = op.n,
              .scale = op.scale,
              .added = added,
              .added_stride = added_width,
          }
      );
    default:  // TAKE
      return f(Take<E>{.x = from, .y = to, .width = from_width, .rows = s.outputs, .last = s.last()});
  }
}

template <class T>
static int step(const Step& s, const Op* ops, int64_t operations) {
  using E = typename T::Element;
  Sizes sizes{};
  sizes.tokens = s.tokens, sizes.rows = s.rows, sizes.heads = s.heads, sizes.kv_heads = s.kv_heads;
  sizes.v_dim = s.head_dim, sizes.blocks = s.blocks, sizes.block_size = s.block_size,
  sizes.cache_blocks = s.cache_blocks;
  if (!inside(sizes, s.slot(), s.pos(), s.cu_q(), s.table()) || !below(s.last(), s.outputs, s.tokens)) return OUTSIDE;
  for (int64_t i = 0; i < operations; i++) {
    if (ops[i].kind == EMBED && !below(s.tok(), s.tokens, s.vocabulary)) return OUTSIDE;
    if (ops[i].kind == ROPE && !below(s.pos(), s.tokens, s.positions)) return OUTSIDE;
  }
  const int crew = threads();
  Work work(sizes, s.cu_q(), crew);
  const Buffer<int64_t> counts(operations), batches(operations);
  if (!work.ok() || !counts.ok() || !batches.ok()) return NO_MEMORY;
  work.fill(sizes, s.cu_q(), s.pos(), s.table(), s.cascade, crew);
  int64_t each = 0;  // scratch of a thread
  for (int64_t i = 0, done = s.cu_q()[s.rows]; i < operations; i++) {
    with_kernel<T>(s, ops[i], work, [&](const auto& kernel) {
      counts[i] = kernel.count(), batches[i] = kernel.batch(crew);
      each = std::max(each, scratch_of(kernel));
    });
    if (ops[i].kind == ATTEND) {  // tokens after those of the rows are padding
      const int64_t width = s.widths[ops[i].to];
      std::fill_n(static_cast<E*>(s.buffers[ops[i].to]) + done * width, (s.tokens - done) * width, E{});
    }
  }
  const Buffer<char> scratch(each * crew);
  if (!scratch.ok()) return NO_MEMORY;
  struct All {
    const Step& s;
    const Op* ops;
    const Work& work;
    char* scratch;
    int64_t each;
  } const all{s, ops, work, scratch.data(), each};
  const auto run = [](const void* what, int64_t i, int64_t begin, int64_t end, int thread) {
    const All& a = *static_cast<const All*>(what);
    with_kernel<T>(a.s, a.ops[i], a.work, [&](const auto& kernel) {
      run_parts(kernel, begin, end, a.scratch + thread * a.each);
    });
  };
  hibachi::work({run, &all, counts.data(), batches.data(), operations, crew, s.seconds});
  return DONE;
}

}  // namespace hibachi

using namespace hibachi;

extern "C" {

EXPORT int64_t hibachi_sizeof_Op() { return sizeof(Op); }
EXPORT int64_t hibachi_sizeof_Step() { return sizeof(Step); }

EXPORT int hibachi_step(int dtype, const Step* s, const Op* ops, int64_t operations) {
  return dtype ? step<Bf16>(*s, ops, operations) : step<F32>(*s, ops, operations);
}
}
