// The operations as custom calls of XLA: typed handlers of its foreign function interface.
//
// All arrays are dense and row by row, as XLA hands them over. backend.py has checked shapes and dtypes.

#include <sched.h>

#include <thread>

#include "attention.h"
#include "linear.h"
#include "share.h"
#include "small.h"
#include "softmax.h"

namespace ffi = xla::ffi;

namespace hibachi {

using Array = ffi::AnyBuffer;
using Made = ffi::Result<ffi::AnyBuffer>;

template <class E>
static E* data(const Array& a) {
  return static_cast<E*>(a.untyped_data());
}

template <class E>
static E* data(Made& a) {
  return static_cast<E*>(a->untyped_data());
}

static int64_t size(const Array& a, int i) { return a.dimensions()[i < 0 ? a.dimensions().size() + i : i]; }

// f(T{}) for the kernels of an array's dtype.
template <class F>
static ffi::Error by_dtype(const Array& a, const F& f) {
  switch (a.element_type()) {
    case ffi::F32: f(F32{}); return ffi::Error::Success();
    case ffi::BF16: f(Bf16{}); return ffi::Error::Success();
    default: return ffi::Error::InvalidArgument("hibachi's native kernels compute in float32 and bfloat16.");
  }
}

// x [m, k] times w, packed, [n, k], plus a bias if there is one; rounded to the dtype of y.
static ffi::Error call_linear(ffi::ThreadPool pool, Array x, Array w, ffi::RemainingArgs bias, Made y) {
  auto b = bias.get<Array>(0);
  const int64_t m = size(x, 0), k = size(x, 1), n = size(*y, 1);
  return by_dtype(x, [&](auto type) {
    using T = decltype(type);
    using E = typename T::Element;
    auto run = [&](auto out) {
      using Out = decltype(out);
      const Linear<T, Out> kernel{
          .x = data<E>(x),
          .x_stride = k,
          .w = data<typename T::Lane>(w),
          .bias = b.has_value() ? data<E>(*b) : nullptr,
          .y = data<typename Out::Element>(y),
          .y_stride = n,
          .m = m,
          .n = n,
          .k = k,
      };
      share(pool, kernel);
    };
    if (y->element_type() == ffi::F32) run(F32{});
    else run(T{});
  });
}

// Rows `at` of a packed w of n rows: y [many, k].
static ffi::Error call_rows(ffi::ThreadPool pool, Array w, Array at, Made y, int64_t n) {
  const int32_t* place = data<int32_t>(at);
  const int64_t many = at.element_count();
  for (int64_t i = 0; i < many; i++)
    if (place[i] < 0 || place[i] >= n)
      return ffi::Error::InvalidArgument(
          "expected rows 0 to " + std::to_string(n - 1) + " of a weight; got " + std::to_string(place[i])
      );
  return by_dtype(w, [&](auto type) {
    using T = decltype(type);
    using E = typename T::Element;
    share(pool, Rows<T>{data<E>(w), place, data<E>(y), many, size(*y, 1)});
  });
}

// keys and values are written in place: XLA has given them the memory of the arguments.
static ffi::Error call_attend(
    ffi::ThreadPool pool,
    Array q,
    Array k,
    Array v,
    Array,
    Array,
    Array slot,
    Array pos,
    Array cu_q,
    Array table,
    Made out,
    Made keys,
    Made values,
    int64_t block_size,
    int64_t window,
    float scale,
    float softcap
) {
  const int64_t heads = size(q, 1), kv_heads = size(k, 1), k_dim = size(k, 2), v_dim = size(v, 2);
  const Sizes s{
      .tokens = size(q, 0),
      .rows = size(cu_q, 0) - 1,
      .heads = heads,
      .kv_heads = kv_heads,
      .k_dim = k_dim,
      .v_dim = v_dim,
      .blocks = size(table, 1),
      .block_size = block_size,
      .q_stride = heads * k_dim,
      .k_stride = kv_heads * k_dim,
      .v_stride = kv_heads * v_dim,
      .window = window,
      .scale = scale,
      .softcap = softcap,
  };
  const int32_t *ends = data<int32_t>(cu_q), *places = data<int32_t>(pos), *blocks = data<int32_t>(table);
  return by_dtype(q, [&](auto type) {
    using T = decltype(type);
    using E = typename T::Element;
    const Layout<T> at(s);
    share(pool, Write<T>{s, at, data<E>(k), data<E>(v), data<E>(keys), data<E>(values), data<int32_t>(slot)});
    const int64_t done = ends[s.rows], each = heads * v_dim;  // tokens after that are padding
    std::fill_n(data<E>(out) + done * each, (s.tokens - done) * each, E{});
    std::vector<Tile> work;
    const Attention<T> attention{s, at, data<E>(q), data<E>(keys), data<E>(values), places, blocks, data<E>(out), work};
    const std::vector<Set> some = sets(s, ends, places, blocks, std::max<int64_t>(1, pool.num_threads()), work);
    share(pool, Cascade<T>{attention, some});
  });
}

static ffi::Error call_rms_norm(ffi::ThreadPool pool, Array x, Array w, Made y, float eps) {
  const int64_t dim = size(w, 0), rows = x.element_count() / dim;
  return by_dtype(x, [&](auto type) {
    using T = decltype(type);
    using E = typename T::Element;
    share(pool, RmsNorm<T>{{data<E>(x), dim, 1, dim}, data<E>(w), {data<E>(y), dim, 1, dim}, rows, dim, eps});
  });
}

static ffi::Error call_layer_norm(ffi::ThreadPool pool, Array x, Array w, ffi::RemainingArgs bias, Made y, float eps) {
  auto b = bias.get<Array>(0);
  const int64_t dim = size(w, 0), rows = x.element_count() / dim;
  return by_dtype(x, [&](auto type) {
    using T = decltype(type);
    using E = typename T::Element;
    const E* added = b.has_value() ? data<E>(*b) : nullptr;
    share(pool, LayerNorm<T>{{data<E>(x), dim, 1, dim}, data<E>(w), added, {data<E>(y), dim, 1, dim}, rows, dim, eps});
  });
}

static ffi::Error call_softmax(ffi::ThreadPool pool, Array x, Made y) {
  const int64_t dim = size(x, -1), rows = x.element_count() / dim;
  return by_dtype(x, [&](auto type) {
    using T = decltype(type);
    using E = typename T::Element;
    share(pool, Softmax<T>{data<E>(x), data<E>(y), rows, dim});
  });
}

// x [tokens, heads, dim]; cos, sin [tokens, 1, dim / 2].
static ffi::Error call_rope(ffi::ThreadPool pool, Array x, Array cos, Array sin, Made y) {
  const int64_t tokens = size(x, 0), heads = size(x, 1), dim = size(x, 2);
  return by_dtype(x, [&](auto type) {
    using T = decltype(type);
    using E = typename T::Element;
    const Pieces<const E> from{.data = data<E>(x), .stride = heads * dim, .groups = heads, .width = dim};
    const Pieces<E> to{.data = data<E>(y), .stride = heads * dim, .groups = heads, .width = dim};
    share(pool, Rope<T>{from, data<E>(cos), data<E>(sin), to, tokens, dim / 2});
  });
}

// Gated if x is twice as wide as y.
static ffi::Error call_activate(ffi::ThreadPool pool, Array x, Made y, int64_t which) {
  const int64_t wide = size(x, -1), dim = size(*y, -1), rows = x.element_count() / wide;
  return by_dtype(x, [&](auto type) {
    using T = decltype(type);
    using E = typename T::Element;
    share(pool, Activate<T>{Activation(which), wide != dim, data<E>(x), wide, data<E>(y), dim, rows, dim});
  });
}

static ffi::Error call_best(ffi::ThreadPool pool, Array x, Made place, Made most) {
  share(pool, Best{data<float>(x), size(x, 0), size(x, 1), data<int32_t>(place), data<float>(most)});
  return ffi::Error::Success();
}

// Weights are packed once, outside of any program: by threads that live no longer than that.
template <class T>
static void pack(const typename T::Element* w, typename T::Element* packed, int64_t n, int64_t k) {
  const Pack<T> kernel{w, packed, n, k};
  const int64_t count = kernel.count(), threads = n * k < 65536 ? 1 : std::max(1u, std::thread::hardware_concurrency());
  std::atomic<int64_t> next{0};
  auto take = [&] {
    for (int64_t i; (i = next.fetch_add(1)) < count;) kernel(i);
  };
  std::vector<std::thread> others;
  for (int64_t i = 1; i < std::min(threads, count); i++) others.emplace_back(take);
  take();
  for (std::thread& t : others) t.join();
}

}  // namespace hibachi

using namespace hibachi;

#define WITH_POOL ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    hibachi_linear, call_linear, WITH_POOL.Arg<Array>().Arg<Array>().RemainingArgs().Ret<Array>()
);
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    hibachi_rows, call_rows, WITH_POOL.Arg<Array>().Arg<Array>().Ret<Array>().Attr<int64_t>("n")
);
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    hibachi_attend,
    call_attend,
    WITH_POOL.Arg<Array>()
        .Arg<Array>()
        .Arg<Array>()
        .Arg<Array>()
        .Arg<Array>()
        .Arg<Array>()
        .Arg<Array>()
        .Arg<Array>()
        .Arg<Array>()
        .Ret<Array>()
        .Ret<Array>()
        .Ret<Array>()
        .Attr<int64_t>("block_size")
        .Attr<int64_t>("window")
        .Attr<float>("scale")
        .Attr<float>("softcap")
);
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    hibachi_rms_norm, call_rms_norm, WITH_POOL.Arg<Array>().Arg<Array>().Ret<Array>().Attr<float>("eps")
);
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    hibachi_layer_norm,
    call_layer_norm,
    WITH_POOL.Arg<Array>().Arg<Array>().RemainingArgs().Ret<Array>().Attr<float>("eps")
);
XLA_FFI_DEFINE_HANDLER_SYMBOL(hibachi_softmax, call_softmax, WITH_POOL.Arg<Array>().Ret<Array>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(hibachi_rope, call_rope, WITH_POOL.Arg<Array>().Arg<Array>().Arg<Array>().Ret<Array>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    hibachi_activate, call_activate, WITH_POOL.Arg<Array>().Ret<Array>().Attr<int64_t>("which")
);
XLA_FFI_DEFINE_HANDLER_SYMBOL(hibachi_best, call_best, WITH_POOL.Arg<Array>().Ret<Array>().Ret<Array>());

extern "C" {

int64_t hibachi_panel() { return WIDTH; }

void hibachi_pack_f32(const float* w, float* packed, int64_t n, int64_t k) { pack<F32>(w, packed, n, k); }
void hibachi_pack_bf16(const uint16_t* w, uint16_t* packed, int64_t n, int64_t k) { pack<Bf16>(w, packed, n, k); }
}
