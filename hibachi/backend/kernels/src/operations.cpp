// The operations by themselves. Pointers, sizes, and strides in elements; what is not said is dense, row by row. Shapes
// and dtypes are checked by who calls (hibachi/backend/native.py), places are checked here.

#include "api.h"
#include "attention.h"
#include "draw.h"
#include "exchange.h"
#include "experts.h"
#include "int8.h"
#include "linear.h"
#include "masks.h"
#include "pack.h"
#include "small.h"
#include "softmax.h"
#include "states.h"
#include "team.h"

using namespace hibachi;

namespace {

int told(bool done) { return done ? DONE : NO_MEMORY; }

// f(T{}) for the kernels of a dtype: 0 is float32, 1 bfloat16.
template <class F>
int by_dtype(int dtype, const F& f) {
  return told(dtype ? f(Bf16{}) : f(F32{}));
}

// f of how numbers are stored, and of what lanes are of them; see pack.h.
template <class F>
auto by_stored(int from, const F& f) {
  switch (from) {
    case 0: return f(pack::Plain<F32>{});
    case 1: return f(pack::Plain<Bf16>{});
    case 2: return f(pack::Plain<pack::F16>{});
    case 3: return f(pack::Block<blocks::Four>{});
    default: return f(pack::Block<blocks::Eight>{});
  }
}

template <class F>
auto by_lanes(int into, const F& f) {
  switch (into) {
    case FLOAT32: return f(pack::Rounded<F32>{});
    case BFLOAT16: return f(pack::Rounded<Bf16>{});
    case INT8: return f(pack::Bytes{});
    case Q4_0: return f(pack::Blocks<blocks::Four>{});
    default: return f(pack::Blocks<blocks::Eight>{});
  }
}

template <class T>
using E = typename T::Element;

template <class T>
const E<T>* in(const void* p) {
  return static_cast<const E<T>*>(p);
}

template <class T>
E<T>* out(void* p) {
  return static_cast<E<T>*>(p);
}

template <class T, class Out>
bool linear(
    const void* x,
    int64_t stride,
    const void* w,
    const void* b,
    void* y,
    int64_t m,
    int64_t n,
    int64_t k,
    int64_t leaves
) {
  const int64_t whole = up(k, T::DEPTH) * T::DEPTH;
  const bool odd = k != whole || stride % T::DEPTH;  // rows must be whole lanes
  const Buffer<E<T>> copy(odd ? m * whole : 0);
  if (!copy.ok()) return false;
  for (int64_t i = 0; odd && i < m; i++) {
    std::copy_n(in<T>(x) + i * stride, k, copy.data() + i * whole);
    std::fill_n(copy.data() + i * whole + k, whole - k, E<T>{});
  }
  return share(
      Linear<T, Out>{
          .factors = Factors<T>(odd ? copy.data() : x, odd ? whole : stride, m, k).of(0, w, nullptr),
          .bias = in<T>(b),
          .y = out<Out>(y),
          .y_stride = n,
          .m = m,
          .n = n,
          .k = whole,
          .leaves = leaves,
      }
  );
}

// The same with panels of a kind that goes with rounded rows.
template <class T, class Out>
bool rounded_linear(
    int kind,
    const void* x,
    int64_t stride,
    const void* w,
    const float* scales,
    const void* b,
    void* y,
    int64_t m,
    int64_t n,
    int64_t k,
    int64_t leaves
) {
  const Buffer<char> memory(int8::Rounded::bytes(m, k));
  if (!memory.ok()) return false;
  const int8::Rounded rounded(memory.data(), m, k);
  return share(int8::Round<T>{.x = in<T>(x), .x_stride = stride, .rounded = rounded, .m = m, .k = k}) &&
         with_factors<T>(kind, [&](auto type) {
           using X = typename decltype(type)::type;
           const X factors = X(memory.data(), 0, m, k).of(0, w, scales);
           return share(
               Linear<T, Out, X>{
                   .factors = factors,
                   .bias = in<T>(b),
                   .y = out<Out>(y),
                   .y_stride = n,
                   .m = m,
                   .n = n,
                   .k = k,
                   .leaves = leaves,
               }
           );
         });
}

// One product of all experts: x [pairs, k] times the matrices w [n, k] of a kind -> y [pairs, n]. Leaf by leaf, if it
// is cut; then(leaf) comes after each.
template <class T, class Out, class F>
bool of_experts(
    const Lists& lists,
    const E<T>* x,
    int64_t kind,
    const void* const* w,
    const float* const* scales,
    E<Out>* y,
    int64_t n,
    int64_t k,
    int64_t leaves,
    const F& then
) {
  const int64_t pairs = lists.tokens * lists.each;
  const Buffer<char> memory(kind < INT8 ? 0 : int8::Rounded::bytes(pairs, k));
  if (!memory.ok()) return false;
  if (kind >= INT8) {
    const int8::Rounded rounded(memory.data(), pairs, k);
    if (!share(int8::Round<T>{.x = x, .x_stride = k, .rounded = rounded, .m = pairs, .k = k})) return false;
  }
  return with_factors<T>(kind, [&](auto type) {
    using X = typename decltype(type)::type;
    const void* rows = kind < INT8 ? static_cast<const void*>(x) : memory.data();
    Linear<T, Out, X> product{.factors = X(rows, k, pairs, k), .y = y, .y_stride = n, .m = pairs, .n = n, .k = k};
    product.leaves = leaves;
    for (product.leaf = 0; product.leaf < leaves; product.leaf++)
      if (!share(OfExperts<Linear<T, Out, X>>{lists, product, w, scales}) || !then(product.leaf)) return false;
    return true;
  });
}

template <class T>
bool experts(const Mixture& a, const void* x, const float* weights, const int32_t* chosen, void* y) {
  const int64_t pairs = a.tokens * a.each, wide = a.gated ? 2 * a.inner : a.inner;
  const Buffer<char> memory(Lists::bytes(a.tokens, a.each, a.experts));
  const Buffer<E<T>> rows(pairs * a.dim), both(pairs * wide), hidden(pairs * a.inner);
  const Buffer<float> parts(a.leaves ? pairs * a.dim : 0), sums(MixLeaf::depth(a.leaves) * a.tokens * a.dim);
  if (!memory.ok() || !rows.ok() || !both.ok() || !hidden.ok() || !parts.ok() || !sums.ok()) return false;
  const Lists lists(memory.data(), a.tokens, a.each, a.experts);
  std::copy_n(weights, pairs, lists.weights), std::copy_n(chosen, pairs, lists.chosen);
  const auto whole = [](int64_t) { return true; };
  const bool inside =
      share(Sort{lists}) && share(Gather<E<T>>{lists, in<T>(x), a.dim, rows.data(), a.dim}) &&
      of_experts<T, T>(lists, rows.data(), a.into_kind, a.into, a.into_scales, both.data(), wide, a.dim, 1, whole) &&
      share(
          Activate<T>{
              Activation(a.activation), bool(a.gated), both.data(), wide, hidden.data(), a.inner, pairs, a.inner
          }
      );
  if (!inside) return false;
  const auto outside = [&]<class Out>(Out, E<Out>* to, int64_t leaves, const auto& then) {
    return of_experts<T, Out>(lists, hidden.data(), a.out_kind, a.out, a.out_scales, to, a.dim, a.inner, leaves, then);
  };
  if (!a.leaves)
    return outside(T{}, rows.data(), 1, whole) &&
           share(Mix<T>{.lists = lists, .x = rows.data(), .y = out<T>(y), .y_stride = a.dim, .dim = a.dim});
  const bool mixed = outside(F32{}, parts.data(), a.leaves, [&](int64_t leaf) {
    return share(MixLeaf{lists, parts.data(), sums.data(), a.dim, leaf, a.leaves});
  });
  if (mixed) std::copy_n(sums.data(), a.tokens * a.dim, out<F32>(y));
  return mixed;
}

}  // namespace

extern "C" {

EXPORT int32_t hibachi_abi() { return ABI; }
EXPORT int64_t hibachi_panel() { return WIDTH; }
EXPORT int64_t hibachi_int8_rounded(int64_t k) { return int8::Rounded::bytes(1, k); }  // bytes of a row of k numbers
EXPORT int64_t hibachi_sizeof_Sizes() { return sizeof(Sizes); }
EXPORT int64_t hibachi_sizeof_Scanned() { return sizeof(Scanned); }
EXPORT int64_t hibachi_sizeof_Mixture() { return sizeof(Mixture); }
EXPORT int64_t hibachi_sizeof_RankExchange() { return sizeof(RankExchange); }
EXPORT int64_t hibachi_draw_parameters() { return sizeof(How) / sizeof(void*); }
EXPORT int64_t hibachi_lists(int64_t tokens, int64_t each, int64_t experts) {  // bytes
  return Lists::bytes(tokens, each, experts);
}

EXPORT int hibachi_threads() { return threads(); }
EXPORT void hibachi_set_threads(int n) { set_threads(n); }
// As many as DISTANCES; before any product is on.
EXPORT void hibachi_set_distances(const int64_t* steps) { std::copy_n(steps, DISTANCES, distances); }

// How many sets of tiles attention makes of a step; -1: no memory.
EXPORT int64_t
hibachi_sets(const Sizes* s, const int32_t* cu_q, const int32_t* pos, const int32_t* table, int threads) {
  Work work(*s, cu_q, threads);
  if (!work.ok()) return -1;
  work.fill(*s, cu_q, pos, table, true, threads);
  return work.set_count();
}

// y [m, n] = x [m, k] times w [n, k], plus b [n] unless it is null; `wide`: float32, else x's dtype. kind: of w, of
// `Panels`; scales: of its rows, if they are of int8.
EXPORT int hibachi_linear(
    int dtype,
    int kind,
    int wide,
    const void* x,
    int64_t stride,
    const void* w,
    const float* scales,
    const void* b,
    void* y,
    int64_t m,
    int64_t n,
    int64_t k,
    int64_t leaves
) {
  return by_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    if (kind < INT8)
      return wide ? linear<T, F32>(x, stride, w, b, y, m, n, k, leaves)
                  : linear<T, T>(x, stride, w, b, y, m, n, k, leaves);
    return wide ? rounded_linear<T, F32>(kind, x, stride, w, scales, b, y, m, n, k, leaves)
                : rounded_linear<T, T>(kind, x, stride, w, scales, b, y, m, n, k, leaves);
  });
}

// Bytes of the panels of a matrix [n, k].
EXPORT int64_t hibachi_packed(int into, int64_t n, int64_t k) {
  return by_lanes(into, [&](auto lanes) { return up(n, WIDTH) * WIDTH * lanes.depth(k) * 4; });
}

// Rows [many, k] become rows `begin` and so on of the n rows of panels. from: 0 is float32, 1 bfloat16, 2 float16,
// 3 and 4 GGUF's Q4_0 and Q8_0; into: of `Panels`, scales for those of int8. order: or null; see pack.h.
EXPORT int hibachi_pack(
    int from,
    int into,
    const void* rows,
    const int32_t* order,
    void* packed,
    float* scales,
    int64_t begin,
    int64_t many,
    int64_t n,
    int64_t k
) {
  if (order && !below(order, many, many)) return OUTSIDE;
  return told(by_stored(from, [&](auto stored) {
    return by_lanes(into, [&](auto lanes) {
      return share(
          pack::Pack<decltype(stored), decltype(lanes)>{
              .rows = static_cast<const char*>(rows),
              .order = order,
              .packed = static_cast<uint32_t*>(packed),
              .scales = scales,
              .begin = begin,
              .many = many,
              .n = n,
              .k = k,
          }
      );
    });
  }));
}

// y [many, k]: rows `at` of w [n, k], as above.
EXPORT int hibachi_rows(
    int dtype,
    int kind,
    const void* w,
    const float* scales,
    const int32_t* at,
    void* y,
    int64_t many,
    int64_t n,
    int64_t k
) {
  if (!below(at, many, n)) return OUTSIDE;
  return by_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const auto* lanes = static_cast<const uint32_t*>(w);
    switch (kind) {
      case INT8: return share(int8::Rows<T>{static_cast<const uint8_t*>(w), scales, at, out<T>(y), many, k});
      case Q4_0: return share(blocks::Rows<T, blocks::Four>{lanes, at, out<T>(y), many, k});
      case Q8_0: return share(blocks::Rows<T, blocks::Eight>{lanes, at, out<T>(y), many, k});
      default: return share(Rows<T>{in<T>(w), at, out<T>(y), many, k});
    }
  });
}

// bias [heads, reach], sinks [heads]: or null.
EXPORT int hibachi_attend(
    int dtype,
    const Sizes* sizes,
    const void* q,
    const void* k,
    const void* v,
    void* keys,
    void* values,
    const int32_t* slot,
    const int32_t* pos,
    const int32_t* cu_q,
    const int32_t* table,
    int cascade,
    const float* bias,
    int64_t reach,
    const float* sinks,
    void* y
) {
  const Sizes& s = *sizes;
  if (!inside(s, slot, pos, cu_q, table)) return OUTSIDE;
  Work work(s, cu_q, threads());
  if (!work.ok()) return NO_MEMORY;
  work.fill(s, cu_q, pos, table, cascade, threads());
  return by_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const Layout<T> at(s);
    const int64_t done = cu_q[s.rows], each = s.heads * s.v_dim;  // tokens after that are padding
    std::fill_n(out<T>(y) + done * each, (s.tokens - done) * each, E<T>{});
    return share(Write<T>{s, at, in<T>(k), in<T>(v), out<T>(keys), out<T>(values), slot}) &&
           share(
               Attention<T>{
                   .s = s,
                   .at = at,
                   .q = in<T>(q),
                   .keys = out<T>(keys),
                   .values = out<T>(values),
                   .pos = pos,
                   .table = table,
                   .out = out<T>(y),
                   .work = work,
                   .bias = bias,
                   .reach = reach,
                   .sinks = sinks,
               }
           );
  });
}

EXPORT int hibachi_rms_norm(
    int dtype, const void* x, int64_t stride, const void* w, void* y, int64_t rows, int64_t dim, float eps
) {
  return by_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return share(RmsNorm<T>{{in<T>(x), stride, 1, dim}, in<T>(w), {out<T>(y), dim, 1, dim}, rows, dim, eps});
  });
}

// b: or null.
EXPORT int hibachi_layer_norm(
    int dtype,
    const void* x,
    int64_t stride,
    const void* w,
    const void* b,
    void* y,
    int64_t rows,
    int64_t dim,
    float eps
) {
  return by_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return share(
        LayerNorm<T>{{in<T>(x), stride, 1, dim}, in<T>(w), in<T>(b), {out<T>(y), dim, 1, dim}, rows, dim, eps}
    );
  });
}

EXPORT int hibachi_softmax(int dtype, const void* x, void* y, int64_t rows, int64_t dim) {
  return by_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return share(Softmax<T>{in<T>(x), out<T>(y), rows, dim});
  });
}

// x, y [tokens, heads, dim]; cos, sin [tokens, dim / 2].
EXPORT int hibachi_rope(
    int dtype,
    const void* x,
    int64_t stride,
    const void* cos,
    const void* sin,
    void* y,
    int64_t tokens,
    int64_t heads,
    int64_t dim
) {
  return by_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return share(
        Rope<T>{
            {in<T>(x), stride, heads, dim},
            in<T>(cos),
            in<T>(sin),
            {out<T>(y), heads * dim, heads, dim},
            tokens,
            dim / 2
        }
    );
  });
}

// y [rows, dim]; x has twice the columns if it is gated.
EXPORT int hibachi_activate(
    int dtype, int which, const void* x, int64_t stride, void* y, int64_t rows, int64_t dim, int gated
) {
  return by_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return share(Activate<T>{Activation(which), bool(gated), in<T>(x), stride, out<T>(y), dim, rows, dim});
  });
}

// See states.h. x: `x_stride` elements from token to token.
EXPORT int hibachi_convolve(
    int dtype,
    const void* past,
    const void* x,
    int64_t x_stride,
    const void* w,
    const void* b,
    void* y,
    void* last,
    int64_t rows,
    int64_t tokens,
    int64_t dim,
    int64_t width
) {
  return by_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return share(
        Convolve<T>{
            in<T>(past), in<T>(x), x_stride, in<T>(w), in<T>(b), out<T>(y), out<T>(last), rows, tokens, dim, width
        }
    );
  });
}

EXPORT int hibachi_scan(int dtype, const Scanned* s) {
  const Scanned& a = *s;
  return by_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return share(
        Scan<T>{
            .state = a.state,
            .dt = in<T>(a.dt),
            .x = in<T>(a.x),
            .gate = in<T>(a.gate),
            .in = in<T>(a.in),
            .out = in<T>(a.out),
            .dt_stride = a.dt_stride,
            .x_stride = a.x_stride,
            .gate_stride = a.gate_stride,
            .in_stride = a.in_stride,
            .out_stride = a.out_stride,
            .decay = a.decay,
            .skip = a.skip,
            .y = out<T>(a.y),
            .last = a.last,
            .rows = a.rows,
            .tokens = a.tokens,
            .dim = a.dim,
            .size = a.size,
        }
    );
  });
}

// x [tokens, experts] -> weights, chosen [tokens, each].
EXPORT int hibachi_route(
    int dtype,
    const void* x,
    int64_t tokens,
    int64_t experts,
    int64_t each,
    int normalised,
    float* weights,
    int32_t* chosen
) {
  return by_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return share(Route<T>{in<T>(x), experts, tokens, each, experts, bool(normalised), weights, chosen});
  });
}

// x, y [tokens, dim]; weights, chosen [tokens, each].
EXPORT int hibachi_experts(
    int dtype, const Mixture* m, const void* x, const float* weights, const int32_t* chosen, void* y
) {
  if (!below(chosen, m->tokens * m->each, m->experts)) return OUTSIDE;
  return by_dtype(dtype, [&](auto type) { return experts<decltype(type)>(*m, x, weights, chosen, y); });
}

EXPORT int hibachi_best(const float* x, int64_t rows, int64_t columns, int32_t* place, float* most) {
  return told(share(Best{x, rows, columns, place, most}));
}

// token, most [rows]; see draw.h.
EXPORT int hibachi_draw(const float* x, int64_t rows, int64_t columns, const How* how, int32_t* token, float* most) {
  return told(share(Draw{x, rows, columns, *how, token, most}));
}

EXPORT int hibachi_mass(const float* x, int64_t rows, int64_t columns, float* most, float* mass) {
  return told(share(Mass{x, rows, columns, most, mass}));
}

// See masks.h.
EXPORT int hibachi_keep_bits(float* x, const uint32_t* bits, int64_t rows, int64_t columns) {
  return told(share(KeepBits{x, bits, rows, columns}));
}

// x [rows, columns], finite [rows]: rows `at` of logits [n, columns]; bits: or null.
EXPORT int hibachi_kept_rows(
    int dtype,
    const void* logits,
    int64_t n,
    const int32_t* at,
    const uint32_t* bits,
    float* x,
    bool* finite,
    int64_t rows,
    int64_t columns
) {
  if (!below(at, rows, n)) return OUTSIDE;
  return by_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return share(KeptRows<T>{in<T>(logits), at, bits, x, finite, rows, columns});
  });
}

EXPORT int64_t hibachi_exchange_bytes(int ranks) { return sizeof(Shared) + 2 * SLOT * ranks; }

// x [n] of all ranks is added up, in each; see exchange.h. Returns MET, ENDED or LATE.
EXPORT int hibachi_exchange_sum(RankExchange* e, float* x, int64_t n) {
  return e->give(reinterpret_cast<const char*>(x), 4 * n, [&](int64_t at, int64_t some, uint64_t turn) {
    (void)share(SumOfRanks{*e, turn, x + at / 4, some / 4});  // it has no scratch
  });
}

// out [rows, stride] is x [rows, width] of all ranks side by side, as far as there is room, in bytes. One rank has it,
// others null.
EXPORT int hibachi_exchange_rows(
    RankExchange* e, const char* x, int64_t rows, int64_t width, char* out, int64_t stride
) {
  return e->give(out ? nullptr : x, rows * width, [&](int64_t at, int64_t some, uint64_t turn) {
    for (int rank = e->first; out && rank < e->end; rank++) {
      const char* from = rank == e->mine ? x + at : e->shared->slot(rank, turn);
      const int64_t left = (rank - e->first) * width, wide = std::min(width, stride - left);
      for (int64_t i = at, step; i < at + some; i += step) {
        step = std::min(width - i % width, at + some - i);
        const int64_t fits = std::min(step, wide - i % width);
        if (fits > 0) std::memcpy(out + i / width * stride + left + i % width, from + i - at, fits);
      }
    }
  });
}
}

#include "xla.h"
