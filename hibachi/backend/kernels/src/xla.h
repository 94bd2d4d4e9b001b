// The operations of operations.cpp as custom calls of XLA. Its interface is one of plain C structs, each of which
// begins with its size and may grow at its end; what is used of them is declared here, so that no file of XLA's is
// needed. Arrays are dense, row by row. Shapes and dtypes were checked when the program was traced. Attributes: `ints`
// and `reals`, arrays.

#pragma once

#include "attention.h"

namespace {

struct Extension {
  size_t struct_size;
  int32_t type;  // 1: XLA asks what we are, see Metadata
  Extension* next;
};

struct Head {
  size_t struct_size;
  Extension* extension;
};

struct Version {
  Head head;
  int32_t major, minor;
};

struct Metadata {
  size_t struct_size;
  Version version;
  uint32_t traits;
  int64_t state_type;  // since version 0.1
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct NewError {
  Head head;
  const char* message;
  int32_t code;
};

struct Api {
  Head head;
  Version version;
  const void* internal;
  void* (*new_error)(NewError*);
};

struct Buffer_ {
  Head head;
  int32_t dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

struct Span {
  const char* text;
  size_t length;
};

struct List {
  int32_t dtype;
  size_t size;
  void* data;
};

template <class E>
struct Some {
  Head head;
  int64_t size;
  int32_t* types;
  E** of;
};

struct Attributes {
  Head head;
  int64_t size;
  int32_t* types;
  Span** names;
  List** of;
};

struct Frame {
  Head head;
  const Api* api;
  void* context;
  int32_t stage;
  Some<Buffer_> in, out;
  Attributes attributes;
};

constexpr int32_t U8_TYPE = 6, F32_TYPE = 11, BF16_TYPE = 16, EXHAUSTED = 8, INVALID = 3;
int32_t minor_version = 3;

bool computed(int32_t dtype) { return dtype == F32_TYPE || dtype == BF16_TYPE || dtype == U8_TYPE; }

void* fail(const Frame* f, int32_t code, const char* message) {
  NewError error{{sizeof(NewError), nullptr}, message, code};
  return f->api->new_error(&error);
}

// What a handler sees.
struct Call {
  const Frame& f;

  int64_t inputs() const { return f.in.size; }
  const void* in(int i) const { return i < f.in.size ? f.in.of[i]->data : nullptr; }
  void* out(int i) const { return f.out.of[i]->data; }
  template <class E>
  const E* in(int i) const {
    return static_cast<const E*>(in(i));
  }
  int64_t size(int i, int dim) const { return dim_of(*f.in.of[i], dim); }
  int64_t out_size(int i, int dim) const { return dim_of(*f.out.of[i], dim); }
  int64_t count(int i) const {
    int64_t n = 1;
    for (int64_t d = 0; d < f.in.of[i]->rank; d++) n *= f.in.of[i]->dims[d];
    return n;
  }
  int dtype(int i = 0) const { return f.in.of[i]->dtype == BF16_TYPE; }
  bool wide() const { return f.out.of[0]->dtype == F32_TYPE; }
  int64_t integer(int i) const { return static_cast<const int64_t*>(list('i')->data)[i]; }
  float real(int i) const { return static_cast<const float*>(list('r')->data)[i]; }

 private:
  static int64_t dim_of(const Buffer_& b, int dim) { return b.dims[dim < 0 ? b.rank + dim : dim]; }
  const List* list(char first) const {
    for (int64_t i = 0; i < f.attributes.size; i++)
      if (f.attributes.names[i]->text[0] == first) return f.attributes.of[i];
    return nullptr;
  }
};

template <class F>
void* handle(Frame* f, const F& run) {
  for (Extension* e = f->head.extension; e; e = e->next)
    if (e->type == 1) {
      Metadata& m = *reinterpret_cast<MetadataExtension*>(e)->metadata;
      m.version = {{sizeof(Version), nullptr}, 0, minor_version};
      m.traits = 0;
      if (m.struct_size >= sizeof(Metadata)) m.state_type = 0;
      return nullptr;
    }
  if (f->stage != 3) return nullptr;
  for (int64_t i = 0; i < f->in.size; i++)
    if (f->in.of[i]->rank < 1 || (i == 0 && !computed(f->in.of[i]->dtype)))
      return fail(f, INVALID, "hibachi's kernels compute arrays of float32 and bfloat16.");
  switch (run(Call{*f})) {
    case DONE: return nullptr;
    case OUTSIDE: return fail(f, INVALID, "A place lies outside of the array that it is a place of.");
    default: return fail(f, EXHAUSTED, "Out of memory: for what a kernel needs besides its arrays.");
  }
}

}  // namespace

extern "C" {

EXPORT void hibachi_xla_version(int minor) { minor_version = minor; }

// x [m, k], w, scales if it is of int8, perhaps b [n] -> y [m, n]; ints: kind of w
EXPORT void* hibachi_xla_linear(Frame* f) {
  return handle(f, [](const Call& c) {
    const int64_t m = c.size(0, 0), k = c.size(0, 1), n = c.out_size(0, 1), kind = c.integer(0);
    const int after = kind == hibachi::INT8 ? 3 : 2;
    const float* scales = after > 2 ? c.in<float>(2) : nullptr;
    return hibachi_linear(c.dtype(), kind, c.wide(), c.in(0), k, c.in(1), scales, c.in(after), c.out(0), m, n, k, 1);
  });
}

// w, at [many], scales if it is of int8 -> y [many, k]; ints: kind of w, its rows
EXPORT void* hibachi_xla_rows(Frame* f) {
  return handle(f, [](const Call& c) {
    const int64_t many = c.count(1), n = c.integer(1), k = c.out_size(0, 1);
    return hibachi_rows(!c.wide(), c.integer(0), c.in(0), c.in<float>(2), c.in<int32_t>(1), c.out(0), many, n, k);
  });
}

// q, k, v [tokens, heads, dim], keys, values, slot, pos, cu_q, table, perhaps a bias [heads, reach], perhaps sinks
// [heads] -> y, keys, values, which XLA has given the memory of the arguments; ints: block size, window, cascade,
// reach, 0 without a bias; reals: scale, softcap
EXPORT void* hibachi_xla_attend(Frame* f) {
  return handle(f, [](const Call& c) {
    const hibachi::Sizes s{
        .tokens = c.size(0, 0),
        .rows = c.size(7, 0) - 1,
        .heads = c.size(0, 1),
        .kv_heads = c.size(1, 1),
        .k_dim = c.size(1, 2),
        .v_dim = c.size(2, 2),
        .blocks = c.size(8, 1),
        .block_size = c.integer(0),
        .cache_blocks = c.size(3, 0),
        .q_stride = c.size(0, 1) * c.size(0, 2),
        .k_stride = c.size(1, 1) * c.size(1, 2),
        .v_stride = c.size(2, 1) * c.size(2, 2),
        .window = c.integer(1),
        .scale = c.real(0),
        .softcap = c.real(1),
    };
    const int32_t *slot = c.in<int32_t>(5), *pos = c.in<int32_t>(6), *cu_q = c.in<int32_t>(7),
                  *table = c.in<int32_t>(8);
    const int64_t reach = c.integer(3);
    const float *bias = reach ? c.in<float>(9) : nullptr, *sinks = c.in<float>(reach ? 10 : 9);
    return hibachi_attend(
        c.dtype(),
        &s,
        c.in(0),
        c.in(1),
        c.in(2),
        c.out(1),
        c.out(2),
        slot,
        pos,
        cu_q,
        table,
        c.integer(2),
        bias,
        reach,
        sinks,
        c.out(0)
    );
  });
}

// x [..., dim], w [dim] -> y; reals: eps
EXPORT void* hibachi_xla_rms_norm(Frame* f) {
  return handle(f, [](const Call& c) {
    const int64_t dim = c.size(0, -1);
    return hibachi_rms_norm(c.dtype(), c.in(0), dim, c.in(1), c.out(0), c.count(0) / dim, dim, c.real(0));
  });
}

// x [..., dim], w [dim], perhaps b [dim] -> y; reals: eps
EXPORT void* hibachi_xla_layer_norm(Frame* f) {
  return handle(f, [](const Call& c) {
    const int64_t dim = c.size(0, -1);
    return hibachi_layer_norm(c.dtype(), c.in(0), dim, c.in(1), c.in(2), c.out(0), c.count(0) / dim, dim, c.real(0));
  });
}

EXPORT void* hibachi_xla_softmax(Frame* f) {
  return handle(f, [](const Call& c) {
    const int64_t dim = c.size(0, -1);
    return hibachi_softmax(c.dtype(), c.in(0), c.out(0), c.count(0) / dim, dim);
  });
}

// x [tokens, heads, dim], cos, sin [tokens, 1, dim / 2] -> y
EXPORT void* hibachi_xla_rope(Frame* f) {
  return handle(f, [](const Call& c) {
    const int64_t tokens = c.size(0, 0), heads = c.size(0, 1), dim = c.size(0, 2);
    return hibachi_rope(c.dtype(), c.in(0), heads * dim, c.in(1), c.in(2), c.out(0), tokens, heads, dim);
  });
}

// x [..., dim], or of twice as many columns -> y [..., dim]; ints: activation
EXPORT void* hibachi_xla_activate(Frame* f) {
  return handle(f, [](const Call& c) {
    const int64_t wide = c.size(0, -1), dim = c.out_size(0, -1), rows = c.count(0) / wide;
    return hibachi_activate(c.dtype(), c.integer(0), c.in(0), wide, c.out(0), rows, dim, wide != dim);
  });
}

// past [rows, width - 1, dim], x [rows, tokens, dim], w [width, dim], perhaps b [dim] -> y, last
EXPORT void* hibachi_xla_convolve(Frame* f) {
  return handle(f, [](const Call& c) {
    const int64_t rows = c.size(1, 0), tokens = c.size(1, 1), dim = c.size(1, 2), width = c.size(2, 0);
    return hibachi_convolve(
        c.dtype(), c.in(0), c.in(1), dim, c.in(2), c.in(3), c.out(0), c.out(1), rows, tokens, dim, width
    );
  });
}

// x, dt, gate [rows, tokens, dim], write, read [rows, tokens, size], state [rows, size, dim], decay [size, dim], skip
// [dim] -> y, state
EXPORT void* hibachi_xla_scan(Frame* f) {
  return handle(f, [](const Call& c) {
    const int64_t dim = c.size(0, 2), size = c.size(3, 2);
    const hibachi::Scanned s{
        .rows = c.size(0, 0),
        .tokens = c.size(0, 1),
        .dim = dim,
        .size = size,
        .dt_stride = dim,
        .x_stride = dim,
        .gate_stride = dim,
        .in_stride = size,
        .out_stride = size,
        .state = c.in<float>(5),
        .dt = c.in(1),
        .x = c.in(0),
        .gate = c.in(2),
        .in = c.in(3),
        .out = c.in(4),
        .decay = c.in<float>(6),
        .skip = c.in<float>(7),
        .y = c.out(0),
        .last = static_cast<float*>(c.out(1)),
    };
    return hibachi_scan(c.dtype(), &s);
  });
}

// x [tokens, experts] -> weights, chosen [tokens, each]; ints: normalised
EXPORT void* hibachi_xla_route(Frame* f) {
  return handle(f, [](const Call& c) {
    float* weights = static_cast<float*>(c.out(0));
    int32_t* chosen = static_cast<int32_t*>(c.out(1));
    return hibachi_route(
        c.dtype(), c.in(0), c.size(0, 0), c.size(0, 1), c.out_size(0, 1), c.integer(0), weights, chosen
    );
  });
}

// x [tokens, dim], weights, chosen [tokens, each], the matrices into all experts, those out of them, perhaps
// the scales of both -> y; ints: experts, inner, activation, gated, kinds of both
EXPORT void* hibachi_xla_experts(Frame* f) {
  return handle(f, [](const Call& c) -> int {
    const int64_t experts = c.integer(0);
    const hibachi::Buffer<const void*> w(2 * experts);
    const hibachi::Buffer<const float*> scales(2 * experts);
    if (!w.ok() || !scales.ok()) return NO_MEMORY;
    const bool bytes = c.inputs() > 3 + 2 * experts;
    for (int64_t i = 0; i < 2 * experts; i++) {
      w[i] = c.in(3 + i);
      if (bytes) scales[i] = c.in<float>(3 + 2 * experts + i);
    }
    const hibachi::Mixture m{
        .tokens = c.size(1, 0),
        .each = c.size(1, 1),
        .experts = experts,
        .dim = c.size(0, 1),
        .inner = c.integer(1),
        .activation = c.integer(2),
        .gated = c.integer(3),
        .into_kind = c.integer(4),
        .out_kind = c.integer(5),
        .into = w.data(),
        .out = w.data() + experts,
        .into_scales = bytes ? scales.data() : nullptr,
        .out_scales = bytes ? scales.data() + experts : nullptr,
    };
    return hibachi_experts(c.dtype(), &m, c.in(0), c.in<float>(1), c.in<int32_t>(2), c.out(0));
  });
}

// x [rows, columns] -> place, most [rows]
EXPORT void* hibachi_xla_best(Frame* f) {
  return handle(f, [](const Call& c) {
    return hibachi_best(
        c.in<float>(0), c.size(0, 0), c.size(0, 1), static_cast<int32_t*>(c.out(0)), static_cast<float*>(c.out(1))
    );
  });
}

// x [rows, columns], and [rows] each those of How -> token, most [rows]
EXPORT void* hibachi_xla_draw(Frame* f) {
  return handle(f, [](const Call& c) {
    constexpr int MANY = sizeof(hibachi::How) / sizeof(void*);
    const void* of[MANY];
    for (int i = 0; i < MANY; i++) of[i] = c.in(1 + i);
    hibachi::How how;
    std::memcpy(&how, of, sizeof how);
    return hibachi_draw(
        c.in<float>(0), c.size(0, 0), c.size(0, 1), &how, static_cast<int32_t*>(c.out(0)), static_cast<float*>(c.out(1))
    );
  });
}

// x [rows, columns] -> most, mass [rows]
EXPORT void* hibachi_xla_mass(Frame* f) {
  return handle(f, [](const Call& c) {
    return hibachi_mass(
        c.in<float>(0), c.size(0, 0), c.size(0, 1), static_cast<float*>(c.out(0)), static_cast<float*>(c.out(1))
    );
  });
}

// logits [n, columns], at [rows], perhaps bits [rows, words] -> x [rows, columns], finite [rows]
EXPORT void* hibachi_xla_kept_rows(Frame* f) {
  return handle(f, [](const Call& c) {
    return hibachi_kept_rows(
        c.dtype(),
        c.in(0),
        c.size(0, 0),
        c.in<int32_t>(1),
        c.in<uint32_t>(2),
        static_cast<float*>(c.out(0)),
        static_cast<bool*>(c.out(1)),
        c.count(1),
        c.size(0, 1)
    );
  });
}
}
