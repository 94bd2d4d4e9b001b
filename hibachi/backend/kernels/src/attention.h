// Causal attention of packed queries over a paged cache, straight from the block table.
//
// A block keeps its positions in spans of 16 (the last one may be short; then spans are put together for attention).
// Keys [blocks, kv_heads, spans, dim / DEPTH, 16] lanes, where a lane holds neighbouring dimensions of one position;
// values [blocks, kv_heads, spans, 16 / DEPTH, dim], where a lane holds neighbouring positions of one dimension. So
// scores of 16 positions, and outputs of 16 dimensions, are one vector each, and nothing is added across lanes.
//
// The positions of a row are cut into pieces of PIECE. Of each, a query has a maximum, a sum and a weighted sum of
// values; those of pieces are merged, the first two, then with the third and so on. So several threads may share one
// row. PIECE is a part of the numerics, and nothing else of how work is cut is.
//
// A tile is some queries (tokens of one row, heads that share a key head) which pass together over the row's spans,
// four at a time, with a running maximum and sum (Milakov & Gimelshein 2018; Dao et al. 2022). The groups of four
// begin at fixed positions and each query's numbers go through the same operations in the same order in any tile:
// what others see beyond it counts as weights of zero, which change no bit.
//
// Tiles that see the same spans, of one prompt or of rows that share a prefix, may pass over these together, so that
// each group is read once for all of them (cascade attention; Juravsky et al. 2024): a query takes its maximum and sum
// along, goes on by itself where the tables part, and has met the same groups in the same order as alone. If they are
// many, queries are what vectors hold, so that nothing is added across lanes there either; see Crowd.

#pragma once

#include "lanes.h"
#include "memory.h"

namespace hibachi {

constexpr int SPANS = 4;      // that are looked at together
constexpr int QUERIES = 6;    // in a tile
constexpr int TOGETHER = 48;  // queries of a set, see Crowd
constexpr int MANY = 9;       // queries from which on a set is a crowd
constexpr int64_t PIECE = 1024;
constexpr int64_t GROUP = SPANS * LANES, PIECE_GROUPS = PIECE / GROUP;

// As in structs.py.
struct Sizes {
  int64_t tokens, rows, heads, kv_heads, k_dim, v_dim;
  int64_t blocks, block_size, cache_blocks;  // blocks: columns of the block table
  int64_t q_stride, k_stride, v_stride;      // elements from token to token
  int64_t window;                            // 0: all positions
  float scale, softcap;                      // softcap 0: none
};

inline bool below(const int32_t* x, int64_t n, int64_t limit) {
  for (int64_t i = 0; i < n; i++)
    if (x[i] < 0 || x[i] >= limit) return false;
  return true;
}

// Do all places lie in the cache? A model may have written into its inputs, and what is outside is somebody else's.
inline bool inside(const Sizes& s, const int32_t* slot, const int32_t* pos, const int32_t* cu_q, const int32_t* table) {
  if (cu_q[0]) return false;
  for (int64_t i = 0; i < s.rows; i++)
    if (cu_q[i + 1] < cu_q[i]) return false;
  const int64_t tokens = cu_q[s.rows];
  return tokens <= s.tokens && below(slot, s.tokens, s.cache_blocks * s.block_size) &&
         below(pos, tokens, s.blocks * s.block_size) && below(table, s.rows * s.blocks, s.cache_blocks);
}

// Where things are in the cache, in lanes.
template <class T>
struct Layout {
  int64_t spans, k_depth, v_wide, k_span, v_span;  // spans of a block; lanes of a key; dimensions of a value

  explicit Layout(const Sizes& s)
      : spans(up(s.block_size, LANES)),
        k_depth(up(s.k_dim, T::DEPTH)),
        v_wide(up(s.v_dim, LANES) * LANES),
        k_span(k_depth * LANES),
        v_span(LANES / T::DEPTH * v_wide) {}
};

template <class T>
static bool finite(const typename T::Element* x, int64_t n) {
  typename T::Bits most = 0;
  for (int64_t i = 0; i < n; i++) {
    typename T::Bits bits;
    std::memcpy(&bits, x + i, sizeof bits);
    most = std::max<typename T::Bits>(most, bits & T::EXPONENT);
  }
  return most != T::EXPONENT;
}

// The upper halves of the lanes of two vectors, as the lower and the upper halves of lanes.
FAST Words zipped(Floats low, Floats high) { return (Words)low >> 16 | ((Words)high & 0xffff0000u); }

// The new keys and values go to their places, before any are read: rows may share blocks that are written now. A value
// that is not finite is written as zeros and its key as NaN, so that it makes NaN of what sees it, and of nothing else:
// the scores of hidden positions are replaced, but their values are multiplied by 0, and 0 * NaN is NaN.
template <class T>
struct Write {
  using Element = typename T::Element;

  const Sizes& s;
  const Layout<T> at;
  const Element *k, *v;
  Element *keys, *values;
  const int32_t* slot;

  int64_t count() const { return up(s.tokens, LANES); }
  int64_t batch(int) const { return 1; }

  void operator()(int64_t i) const {
    const int64_t end = std::min(s.tokens, (i + 1) * LANES);
    for (int64_t t = i * LANES, n; t < end; t += n) {
      const int64_t block = slot[t] / s.block_size, offset = slot[t] % s.block_size, place = offset % LANES;
      const int64_t room = std::min(LANES - place, s.block_size - offset);  // in its span
      for (n = 1; n < room && t + n < end && slot[t + n] == slot[t] + n; n++) {
      }
      for (int64_t h = 0; h < s.kv_heads; h++)
        neighbours(t, n, h, (block * s.kv_heads + h) * at.spans + offset / LANES, place);
    }
  }

  // Tokens t to before t + n, which lie in a span, from its position i on.
  void neighbours(int64_t t, int64_t n, int64_t h, int64_t span, int64_t i) const {
    constexpr int D = T::DEPTH;
    auto key = [&](int64_t j) { return k + (t + j) * s.k_stride + h * s.k_dim; };
    auto value = [&](int64_t j) { return v + (t + j) * s.v_stride + h * s.v_dim; };
    Element* to_key = keys + (span * at.k_span + i) * D;
    bool good[LANES];
    for (int64_t j = 0; j < n; j++) good[j] = finite<T>(value(j), s.v_dim);
    const bool all_good = std::all_of(good, good + n, [](bool b) { return b; });
    if (all_good && s.k_dim % D == 0) {
      for (int64_t d = 0; d < at.k_depth; d++)
        for (int64_t j = 0; j < n; j++) std::copy_n(key(j) + d * D, D, to_key + (d * LANES + j) * D);
    } else {
      for (int64_t j = 0; j < n; j++)
        for (int64_t d = 0; d < s.k_dim; d++) to_key[(d / D * LANES + j) * D + d % D] = good[j] ? key(j)[d] : T::nan();
    }
    for (int64_t j = 0, two; j < n; j += 1 + two) {
      Element* to_value = values + (span * at.v_span + (i + j) / D * at.v_wide) * D + (i + j) % D;
      two = D == 2 && all_good && (i + j) % 2 == 0 && j + 1 < n;  // both of a lane
      if (two) {
        for (int64_t d = 0; d < s.v_dim; d += LANES) {
          const int some = std::min<int64_t>(LANES, s.v_dim - d);
          const Floats both[2] = {read_some<T>(value(j) + d, some), read_some<T>(value(j + 1) + d, some)};
          store(to_value + d * D, zipped(both[0], both[1]));
        }
      } else {
        for (int64_t d = 0; d < s.v_dim; d++) to_value[d * D] = good[j] ? value(j)[d] : Element{};
      }
    }
  }
};

// Some tokens of a row, for some of the query heads that share a key head.
struct Tile {
  int32_t row, first, tokens, kv_head, head, heads;
};

// How the heads that share a key head are cut: so many parts, of so many heads, with so many tokens in a tile.
struct Cut {
  int group, heads, tokens;

  Cut(int64_t group, int64_t queries = QUERIES)
      : group(group), heads(up(group, up(group, queries))), tokens(std::max<int64_t>(1, queries / heads)) {}

  int64_t parts() const { return up(group, heads); }
};

// Tiles of one key head: f(tile) for each.
template <class F>
static void each_tile(const Sizes& s, const int32_t* cu_q, const F& f) {
  const Cut cut(s.heads / s.kv_heads);
  for (int32_t row = 0; row < s.rows; row++)
    for (int32_t t = cu_q[row], end = cu_q[row + 1], n; t < end; t += n) {
      n = std::min(cut.tokens, end - t);
      for (int32_t g = 0; g < cut.group; g += cut.heads) f(Tile{row, t, n, 0, g, std::min(cut.heads, cut.group - g)});
    }
}

// Tiles `begin` to before `end`. Of several rows: they see the first `groups` groups of spans alike.
struct Set {
  int32_t begin, end;
  int64_t groups;
};

// What a thread computes at once: all pieces of a set, or one of them, whose result has a place in memory.
struct Unit {
  int32_t set, piece;  // piece -1: all
  int64_t result;      // of the first piece of the set, in queries
};

// The tiles of a step, and sets of them. Tiles of a row are neighbours, and so are rows whose tables begin alike; a set
// of several rows grows for as long as it saves more reads so. Without `cascade`, each tile is a set.
class Work {
 public:
  // Counts. Memory is asked for then: `ok`.
  Work(const Sizes& s, const int32_t* cu_q, int threads)
      : wide(up(s.v_dim, LANES) * LANES),
        tiles(count(s, cu_q)),
        most_pieces(tiles.count < ENOUGH * threads ? up(s.blocks * s.block_size, PIECE) : 1),
        sets_(tiles.count),
        some(tiles.count / s.kv_heads),
        units(tiles.count * most_pieces),
        left_(most_pieces > 1 ? tiles.count : 0),
        results(most_pieces > 1 ? tiles.count * most_pieces * QUERIES * result_size() : 0) {}

  bool ok() const { return tiles.memory.ok() && sets_.ok() && some.ok() && units.ok() && left_.ok() && results.ok(); }
  const Tile* tile() const { return tiles.memory.data(); }
  int64_t tile_count() const { return tiles.count; }
  const Set* set() const { return sets_.data(); }
  int64_t set_count() const { return found; }
  const Unit& unit(int64_t i) const { return units[i]; }
  int64_t unit_count() const { return many; }

  // Of a query of a piece: the maximum, a vector of sums, and the weighted sum of values.
  int64_t result_size() const { return 2 * LANES + wide; }
  float* result(int64_t query) const { return results.data() + query * result_size(); }
  // Pieces of a set that are not computed yet.
  int32_t& left(int32_t set) const { return left_[set]; }

  void fill(const Sizes& s, const int32_t* cu_q, const int32_t* pos, const int32_t* table, bool cascade, int threads) {
    const int64_t group = s.heads / s.kv_heads;
    auto less = [&](const Tile& a, const Tile& b) {
      if (a.row == b.row) return a.first != b.first ? a.first < b.first : a.head < b.head;
      const int32_t *x = table + a.row * s.blocks, *y = table + b.row * s.blocks;
      const auto [p, q] = std::mismatch(x, x + s.blocks, y);
      return p == x + s.blocks ? a.row < b.row : *p < *q;
    };
    auto seen = [&](const Tile& a) {  // groups that all of its tokens see to the end
      return pos[a.first] / GROUP;
    };
    auto alike = [&](const Tile& a, const Tile& b) {
      const int64_t most = std::min(seen(a), seen(b));
      if (a.row == b.row) return most;
      const int64_t wanted = std::min(s.blocks, up(most * GROUP, s.block_size));
      const int32_t *x = table + a.row * s.blocks, *end = x + wanted;
      const int64_t blocks = std::mismatch(x, end, table + b.row * s.blocks).first - x;
      return std::min(most, blocks * s.block_size / GROUP);
    };
    int64_t n = 0, made = 0, queries_before = 0;
    each_tile(s, cu_q, [&](const Tile& t) { some[n++] = t; });
    if (cascade) std::sort(some.data(), some.data() + n, less);
    const int64_t most = std::min<int64_t>(TOGETHER, cu_q[s.rows] * s.heads / (4 * threads));
    found = many = 0;
    for (int64_t i = 0, j; i < n; i = j) {
      int64_t queries = some[i].tokens * some[i].heads, groups = cascade ? seen(some[i]) : 0, last = 0;
      for (j = i + 1; cascade && j < n && queries + some[j].tokens * some[j].heads <= most; j++) {
        const int64_t fewer = std::min(groups, alike(some[j - 1], some[j])), before = j - i;
        if (some[j].row != some[i].row && fewer * before <= groups * (before - 1)) break;
        groups = fewer, queries += some[j].tokens * some[j].heads;
      }
      for (int64_t t = i; t < j; t++) last = std::max<int64_t>(last, pos[some[t].first + some[t].tokens - 1]);
      const int64_t pieces = most_pieces > 1 ? last / PIECE + 1 : 1;
      // Heads of a piece one after another, as they lie in memory.
      for (int64_t p = 0; p < pieces; p++)
        for (int32_t h = 0; h < s.kv_heads; h++)
          units[many++] = {int32_t(found + h), pieces > 1 ? int32_t(p) : -1, queries_before + h * pieces * queries};
      queries_before += pieces > 1 ? s.kv_heads * pieces * queries : 0;
      for (int32_t h = 0; h < s.kv_heads; h++) {
        if (pieces > 1) left_[found] = pieces;
        sets_[found++] = {int32_t(made), int32_t(made + j - i), groups};
        for (int64_t t = i; t < j; t++) {
          Tile& tile = tiles.memory[made++] = some[t];
          tile.kv_head = h, tile.head += h * group;
        }
      }
    }
  }

 private:
  static constexpr int64_t ENOUGH = 8;  // tiles for each thread, with which they do without sharing a row

  struct Tiles {
    int64_t count;
    Buffer<Tile> memory;

    explicit Tiles(int64_t n) : count(n), memory(n) {}
  };

  int64_t wide;
  Tiles tiles;
  int64_t most_pieces;
  Buffer<Set> sets_;
  Buffer<Tile> some;
  Buffer<Unit> units;
  Buffer<int32_t> left_;
  Buffer<float> results;
  int64_t found = 0, many = 0;

  static int64_t count(const Sizes& s, const int32_t* cu_q) {
    int64_t n = 0;
    each_tile(s, cu_q, [&](const Tile&) { n++; });
    return n * s.kv_heads;
  }
};

// From memory to the second cache. The first one waits for too few lines at a time: so it is a quarter faster. Not left
// to be inlined: g++ 12 takes a function that only does this for one without effect, and drops calls of it.
FAST void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Scores [N queries][S spans] of 16 positions each. Meanwhile what is needed next, `soon`, is fetched from memory.
template <class T, int N, int S>
static void score(
    const typename T::Lane* q,
    int64_t depth,
    const typename T::Lane* const* keys,
    const typename T::Lane* const* soon,
    Floats (*out)[SPANS]
) {
  constexpr int WIDE = N * S * PARTS <= REGISTERS ? S : 1;  // spans whose sums stay in registers
  for (int first = 0; first < S; first += WIDE) {
    Part sums[N][WIDE][PARTS] = {};
    products<T>(sums, [&](auto arithmetic) __attribute__((always_inline)) {
      using A = decltype(arithmetic);
      for (int64_t d = 0; d < depth; d++)
        for (int c = 0; c < WIDE; c++) {
          typename T::Wide k[PARTS];
          for (int p = 0; p < PARTS; p++) k[p] = T::wide(load<PartWords>(keys[first + c] + d * LANES + p * PART));
          fetch(soon[first + c] + d * LANES);
          for (int r = 0; r < N; r++)
            for (int p = 0; p < PARTS; p++) sums[r][c][p] = A::multiply(sums[r][c][p], k[p], q[r * depth + d]);
        }
    });
    for (int r = 0; r < N; r++) std::memcpy(&out[r][first], sums[r], sizeof sums[r]);
  }
}

// out [N][C] (rows `wide` apart) = out * old [N] + weights [N][spans * 16] times the values of C * 16 dimensions.
template <class T, int N, int C>
static void mix(
    const typename T::Element (*weights)[SPANS * LANES],
    const float* old,
    const typename T::Lane* const* values,
    const typename T::Lane* const* soon,
    int spans,
    int64_t wide,
    float* out
) {
  constexpr int WIDE = N * C * PARTS <= REGISTERS ? C : 1, EACH = WIDE * PARTS;
  for (int first = 0; first < C; first += WIDE) {
    const int64_t at = first * LANES;
    Part sums[N][EACH];
    for (int r = 0; r < N; r++)
      for (int c = 0; c < EACH; c++) sums[r][c] = load<Part>(out + r * wide + at + c * PART) * old[r];
    settle<typename T::Products>(sums);
    products<T>(sums, [&](auto arithmetic) __attribute__((always_inline)) {
      using A = decltype(arithmetic);
      for (int s = 0; s < spans; s++)
        for (int i = 0; i < LANES / T::DEPTH; i++) {
          typename T::Wide v[EACH];
          for (int c = 0; c < EACH; c++) v[c] = T::wide(load<PartWords>(values[s] + i * wide + at + c * PART));
          for (int c = 0; c < WIDE; c++) fetch(soon[s] + i * wide + at + c * LANES);
          for (int r = 0; r < N; r++) {
            auto w = load<typename T::Lane>(weights[r] + s * LANES + i * T::DEPTH);
            for (int c = 0; c < EACH; c++) sums[r][c] = A::multiply(sums[r][c], v[c], w);
          }
        }
    });
    for (int r = 0; r < N; r++) std::memcpy(out + r * wide + at, sums[r], sizeof sums[r]);
  }
}

// A vector of sums of weights, plus those of `lanes` lanes: the first of each sixteen to the first sum, and so on.
template <class T>
static Floats added_up(Floats total, const typename T::Element* weights, int lanes) {
  Part sums[PARTS];
  std::memcpy(sums, &total, sizeof sums);
  settle<typename T::Products>(sums);
  products<T>(sums, [&](auto arithmetic) __attribute__((always_inline)) {
    using A = decltype(arithmetic);
    for (int i = 0; i < lanes; i += LANES)
      for (int p = 0; p < PARTS; p++)
        sums[p] = A::multiply(sums[p], T::wide(load<PartWords>(weights + (i + p * PART) * T::DEPTH)), T::ONE);
  });
  return load<Floats>(sums);
}

// Many queries that see the same spans, as the lanes of vectors: the same operations in the same order for each of them
// as with positions and dimensions as lanes, in other registers. `wide`: up to whole vectors.
template <class T>
struct Crowd {
  using Lane = typename T::Lane;
  static constexpr int BLOCK = 3;  // registers of queries at once

  int wide;
  Lane* queries;  // [lanes of a key, wide]
  float* scores;  // [positions of a group, wide], and then their weights as lanes
  float* sums;    // [dimensions, wide]
  float* totals;  // [LANES, wide]
  float *most, *old;
  int32_t* position;

  static int64_t bytes(int64_t k_depth, int64_t v_wide) {
    return (k_depth + GROUP + v_wide + LANES + 3) * TOGETHER * sizeof(float);
  }

  Crowd(char* memory, int n, int64_t k_depth, int64_t v_wide) : wide(up(n, LANES) * LANES) {
    queries = reinterpret_cast<Lane*>(memory);
    scores = reinterpret_cast<float*>(queries + k_depth * wide);
    sums = scores + GROUP * wide;
    totals = sums + v_wide * wide;
    most = totals + LANES * wide;
    old = most + wide;
    position = reinterpret_cast<int32_t*>(old + wide);
  }

  // f(first register, constant number of registers) for all queries.
  template <class F>
  void blocks(const F& f) const {
    for (int at = 0, left = wide / PART, n; left; at += n, left -= n) {
      n = up(left, up(left, BLOCK));
      with_constant<BLOCK>(n, [&](auto many) { f(at, many); });
    }
  }

  // sums [ROWS][B] += over `depth`: B registers of `lanes` times ROWS numbers, whose steps are `apart` lanes from each
  // other.
  template <class A, int ROWS, int B>
  FAST void multiply(
      Part (&sums)[ROWS][B], const Lane* lanes, const Lane* numbers, int64_t depth, int64_t apart
  ) const {
    for (int64_t d = 0; d < depth; d++) {
      typename T::Wide w[B];
      for (int b = 0; b < B; b++) w[b] = T::wide(load<PartWords>(lanes + d * wide + b * PART));
      for (int r = 0; r < ROWS; r++)
        for (int b = 0; b < B; b++) sums[r][b] = A::multiply(sums[r][b], w[b], numbers[d * apart + r]);
    }
  }

  // Rows of sums that are kept in registers beside B registers of queries.
  template <int B>
  static constexpr int ROWS = REGISTERS / B >= 16  ? 16
                              : REGISTERS / B >= 8 ? 8
                              : REGISTERS / B >= 4 ? 4
                                                   : 2;

  // The memory of a span, for later.
  static void ask(const Lane* span, int64_t lanes) {
    for (int64_t i = 0; i < lanes; i += 64 / sizeof(Lane)) fetch(span + i);
  }

  void score(const Lane* const* keys, int spans, int64_t depth) const {
    blocks([&](int at, auto many) {
      constexpr int B = many, R = ROWS<B>;
      for (int p = 0; p < spans * LANES; p += R) {
        Part sums[R][B] = {};
        products<T>(sums, [&](auto arithmetic) __attribute__((always_inline)) {
          using A = decltype(arithmetic);
          multiply<A>(sums, queries + at * PART, keys[p / LANES] + p % LANES, depth, LANES);
        });
        for (int r = 0; r < R; r++)
          for (int b = 0; b < B; b++) store(scores + (p + r) * wide + (at + b) * PART, sums[r][b]);
      }
    });
  }

  // Sums of `dims` dimensions, a multiple of LANES.
  void mix(const Lane* const* values, int spans, int64_t v_wide) const {
    blocks([&](int at, auto many) {
      constexpr int B = many, R = ROWS<B>;
      for (int64_t d = 0; d < v_wide; d += R) {
        Part s[R][B];
        for (int r = 0; r < R; r++)
          for (int b = 0; b < B; b++)
            s[r][b] = load<Part>(sums + (d + r) * wide + (at + b) * PART) * load<Part>(old + (at + b) * PART);
        settle<typename T::Products>(s);
        products<T>(s, [&](auto arithmetic) __attribute__((always_inline)) {
          using A = decltype(arithmetic);
          const Lane* weights = reinterpret_cast<const Lane*>(scores) + at * PART;
          for (int c = 0; c < spans; c++, weights += LANES / T::DEPTH * wide)
            multiply<A>(s, weights, values[c] + d, LANES / T::DEPTH, v_wide);
        });
        for (int r = 0; r < R; r++)
          for (int b = 0; b < B; b++) store(sums + (d + r) * wide + (at + b) * PART, s[r][b]);
      }
    });
  }

  // Scores to weights, and what the sums so far count now. Positions begin with `first`; seen(scores, which lanes,
  // their position): what a score is.
  template <class F>
  void weigh(int spans, const F& seen) const {
    const float none = -std::numeric_limits<float>::infinity();
    for (int at = 0; at < wide; at += LANES) {
      const Ints where = load<Ints>(position + at);
      Floats high = all(none), before = load<Floats>(most + at);
      for (int p = 0; p < spans * LANES; p++) {
        const Floats x = seen(load<Floats>(scores + p * wide + at), where, p);
        store(scores + p * wide + at, x);
        high = larger(x, high);
      }
      high = larger(high, before);
      const Floats zero = choose(high == none, Floats{}, high);  // nothing seen yet
      const Floats kept = choose(high != before, exp(before - zero), all(1.0f));
      store(most + at, high), store(old + at, kept);
      for (int p = 0, i = 0; p < spans * LANES; p += T::DEPTH, i++) {
        Floats w[T::DEPTH];
        for (int j = 0; j < T::DEPTH; j++) w[j] = T::weight(load<Floats>(scores + (p + j) * wide + at) - zero);
        store(scores + i * wide + at, T::together(w));  // it lies before what is read next
      }
      const int lanes = spans * LANES / T::DEPTH, whole = up(lanes, LANES) * LANES;
      for (int i = lanes; i < whole; i++) store(scores + i * wide + at, Floats{});
      for (int l = 0; l < LANES; l++) add(l, at, whole, kept);
    }
  }

  // The weights of lanes l, l + 16 and so on, to a vector of sums.
  FAST void add(int l, int at, int lanes, Floats kept) const {
    Floats total = load<Floats>(totals + l * wide + at) * kept;
    Part s[PARTS];
    std::memcpy(s, &total, sizeof s);
    settle<typename T::Products>(s);
    products<T>(s, [&](auto arithmetic) __attribute__((always_inline)) {
      using A = decltype(arithmetic);
      for (int i = l; i < lanes; i += LANES)
        for (int p = 0; p < PARTS; p++)
          s[p] = A::multiply(s[p], T::wide(load<PartWords>(scores + i * wide + at + p * PART)), T::ONE);
    });
    std::memcpy(totals + l * wide + at, s, sizeof s);
  }
};

// Attention of the sets of tiles of a step.
template <class T>
struct Attention {
  using Element = typename T::Element;
  using Lane = typename T::Lane;

  const Sizes& s;
  const Layout<T> at;
  const Element *q, *keys, *values;
  const int32_t *pos, *table;
  Element* out;
  const Work& work;
  const float* bias = nullptr;  // [heads, reach]: added to a score by how far its key is back, see `by_distance`
  int64_t reach = 0;
  const float* sinks = nullptr;  // [heads]: scores that have no value

  // Of each query of a set: the largest score so far, sums of weights, and weighted sums of values.
  struct Sums {
    float* values;
    float total[TOGETHER][LANES];
    float most[TOGETHER];
  };

  // What is kept of a set.
  struct Kept {
    int n = 0;
    Lane *lanes, *gathered;  // queries; spans, where blocks are no multiple of them
    int64_t position[TOGETHER], head[TOGETHER];
    // Of one piece: its last span, and what comes after it, which is another unit.
    int64_t stop = std::numeric_limits<int64_t>::max(), after_span = 0;
    const Tile* after = nullptr;
    Sums both[2], *now = both, *before = both + 1;  // of a piece, and of those before it
    char* crowd;

    Kept(char* memory, const Layout<T>& at, int64_t gathers) {
      now->values = reinterpret_cast<float*>(memory);
      before->values = now->values + TOGETHER * at.v_wide;
      lanes = reinterpret_cast<Lane*>(before->values + TOGETHER * at.v_wide);
      gathered = lanes + TOGETHER * at.k_depth;
      crowd = reinterpret_cast<char*>(gathered + gathers);
    }
  };

  int64_t count() const { return work.unit_count(); }
  // Neighbours go together, see `group`.
  int64_t batch(int threads) const { return std::max<int64_t>(1, count() / (16 * threads)); }
  int64_t gathers() const { return s.block_size % LANES ? SPANS * (at.k_span + at.v_span) : 0; }
  int64_t scratch() const {
    return TOGETHER * 2 * at.v_wide * sizeof(float) + (TOGETHER * at.k_depth + gathers()) * sizeof(Lane) +
           Crowd<T>::bytes(at.k_depth, at.v_wide);
  }

  void operator()(int64_t i, char* scratch) const {
    const Unit& unit = work.unit(i);
    const Set& set = work.set()[unit.set];
    const Tile *begin = work.tile() + set.begin, *end = work.tile() + set.end;
    Kept kept(scratch, at, gathers());
    int64_t first = std::numeric_limits<int64_t>::max(), last = 0;  // pieces that somebody sees
    for (const Tile* tile = begin; tile < end; tile++)
      each(*tile, [&](int64_t t, int64_t h) {
        Lane* to = kept.lanes + kept.n * at.k_depth;
        to[at.k_depth - 1] = Lane{};
        std::memcpy(to, q + t * s.q_stride + h * s.k_dim, s.k_dim * sizeof(Element));
        kept.position[kept.n] = pos[t], kept.head[kept.n] = h;
        first = std::min(first, first_group(pos[t]) / PIECE_GROUPS), last = std::max(last, pos[t] / PIECE);
        kept.n++;
      });
    if (unit.piece < 0) {
      run(begin, end, set.groups, first, kept);
      for (int64_t piece = first + 1; piece <= last; piece++) {
        std::swap(kept.now, kept.before);
        run(begin, end, set.groups, piece, kept);
        std::swap(kept.now, kept.before);
        Sums &sums = *kept.now, &more = *kept.before;
        for (int r = 0; r < kept.n; r++) merge(sums, r, more.most[r], more.total[r], row(more, r));
      }
      return finish(begin, end, *kept.now);
    }
    Sums& sums = *kept.now;
    const Unit& next = i + 1 < count() ? work.unit(i + 1) : unit;
    kept.stop = (unit.piece + 1) * PIECE / LANES - 1;
    kept.after = work.tile() + work.set()[next.set].begin;
    kept.after_span = std::max(0, next.piece) * PIECE / LANES;
    if (unit.piece >= first && unit.piece <= last) {
      run(begin, end, set.groups, unit.piece, kept);
      for (int r = 0; r < kept.n; r++) {
        float* result = work.result(unit.result + unit.piece * kept.n + r);
        result[0] = sums.most[r];
        std::copy_n(sums.total[r], LANES, result + LANES);
        std::copy_n(row(sums, r), at.v_wide, result + 2 * LANES);
      }
    }
    // Who computed the last piece merges them, in their order.
    if (__atomic_sub_fetch(&work.left(unit.set), 1, __ATOMIC_ACQ_REL)) return;
    work.left(unit.set) = last + 1;  // for the next layer
    for (int r = 0; r < kept.n; r++) {
      sums.most[r] = -std::numeric_limits<float>::infinity();
      std::fill_n(sums.total[r], LANES, 0.0f), std::fill_n(row(sums, r), at.v_wide, 0.0f);
      for (int64_t piece = first; piece <= last; piece++) {
        const float* result = work.result(unit.result + piece * kept.n + r);
        merge(sums, r, result[0], result + LANES, result + 2 * LANES);
      }
    }
    finish(begin, end, sums);
  }

  static int64_t span_of(int64_t position) { return position / LANES; }

  int64_t first_group(int64_t position) const {
    return s.window ? span_of(std::max<int64_t>(0, position - s.window + 1)) / SPANS : 0;
  }

  float* row(const Sums& sums, int r) const { return sums.values + r * at.v_wide; }

  // What was found of a query, with what was found in the next piece. Who saw nothing there keeps what it has.
  void merge(Sums& sums, int r, float more, const float* more_total, const float* more_values) const {
    const float before = sums.most[r], none = -std::numeric_limits<float>::infinity();
    const float most = sums.most[r] = std::max(before, more), zero = most == none ? 0.0f : most;
    const Floats mine = exp(all(before - zero)), its = exp(all(more - zero));
    auto join = [&](float* to, const float* from) { store(to, fma(load<Floats>(from), its, load<Floats>(to) * mine)); };
    join(sums.total[r], more_total);
    for (int64_t d = 0; d < at.v_wide; d += LANES) join(row(sums, r) + d, more_values + d);
  }

  // One piece of the positions of tiles. Those of several rows see the groups before `alike` alike.
  void run(const Tile* begin, const Tile* end, int64_t alike, int64_t piece, Kept& kept) const {
    const int64_t low = piece * PIECE_GROUPS, high = low + PIECE_GROUPS;
    std::fill_n(kept.now->values, kept.n * at.v_wide, 0.0f);
    int64_t from = 0, last = 0;  // the first group that all of them see, the last that anyone does
    for (const Tile* tile = begin; tile < end; tile++) from = std::max(from, first_group(pos[tile->first]));
    for (int r = 0; r < kept.n; r++) {
      last = std::max(last, kept.position[r] / GROUP);
      const bool begins = sinks && first_group(kept.position[r]) / PIECE_GROUPS == piece;
      kept.now->most[r] = begins ? sinks[kept.head[r]] : -std::numeric_limits<float>::infinity();
      std::fill_n(kept.now->total[r], LANES, 0.0f);
      if (begins) kept.now->total[r][0] = 1.0f;  // exp(sink - most)
    }
    if (end - begin > 1) {
      // Tiles of one row go together to the end: who does not see a position gives it a weight of zero.
      const bool one_row = begin->row == end[-1].row && kept.n >= MANY && !bias;
      if (one_row) alike = last + 1;
      const int64_t to = std::min(alike, high), first = one_row ? first_group(kept.position[0]) : from;
      if (!one_row) alone(begin, end, low, std::min(first, high), kept);
      if (kept.n >= MANY && !bias) crowd(begin, std::max(first, low), to, one_row || first <= low, kept);
      else
        for (int64_t g = std::max(first, low); g < to; g++)
          group(begin, 0, kept.n, g, span_of(kept.position[0]), 0, kept);
      from = std::max(from, alike);
    }
    alone(begin, end, std::max(from, low), high, kept);
  }

  void finish(const Tile* begin, const Tile* end, const Sums& sums) const {
    int r = 0;
    for (const Tile* tile = begin; tile < end; tile++)
      each(*tile, [&](int64_t t, int64_t h) {
        Floats by = all(1.0f / sum(load<Floats>(sums.total[r])));
        for (int64_t d = 0; d < s.v_dim; d += LANES) {
          Floats y = load<Floats>(row(sums, r) + d) * by + 0.0f;  // no -0, which depends on added zeros
          write_some<T>(out + (t * s.heads + h) * s.v_dim + d, y, s.v_dim - d);
        }
        r++;
      });
  }

  // f of token and head of each query of a tile.
  template <class F>
  static void each(const Tile& tile, const F& f) {
    for (int64_t t = tile.first; t < tile.first + tile.tokens; t++)
      for (int64_t h = tile.head; h < tile.head + tile.heads; h++) f(t, h);
  }

  // The groups `from` to before `to` that tiles see, one tile after the other.
  void alone(const Tile* begin, const Tile* end, int64_t from, int64_t to, Kept& kept) const {
    for (int r = 0; begin < end; begin++) {
      const int n = begin->tokens * begin->heads;
      const int64_t last = span_of(kept.position[r + n - 1]);  // positions rise within a tile
      for (int64_t g = std::max(from, first_group(kept.position[r])); g < std::min(to, last / SPANS + 1); g++)
        group(begin, r, r + n, g, last, begin + 1 < end ? from : 0, kept);
      r += n;
    }
  }

  // Spans of a row whose blocks are cut otherwise, as if they were not: sums must not depend on the size of a block.
  void gather(const Tile& tile, int64_t first, int spans, const Lane** k, const Lane** v, Lane* to) const {
    constexpr int D = T::DEPTH;
    std::fill_n(to, spans * (at.k_span + at.v_span), Lane{});
    for (int c = 0; c < spans; c++) {
      Element* key = reinterpret_cast<Element*>(to + c * (at.k_span + at.v_span));
      Element* value = key + at.k_span * D;
      k[c] = reinterpret_cast<Lane*>(key), v[c] = reinterpret_cast<Lane*>(value);
      for (int64_t i = 0; i < LANES; i++) {
        const int64_t p = (first + c) * LANES + i, block = p / s.block_size, inside = p % s.block_size,
                      j = inside % LANES;
        if (block >= s.blocks) return;
        const int64_t span =
            (table[tile.row * s.blocks + block] * s.kv_heads + tile.kv_head) * at.spans + inside / LANES;
        const Element *from_key = keys + span * at.k_span * D, *from_value = values + span * at.v_span * D;
        for (int64_t d = 0; d < at.k_depth; d++)
          std::copy_n(from_key + (d * LANES + j) * D, D, key + (d * LANES + i) * D);
        for (int64_t d = 0; d < at.v_wide; d++)
          value[(i / D * at.v_wide + d) * D + i % D] = from_value[(j / D * at.v_wide + d) * D + j % D];
      }
    }
  }

  // Where the spans of a group are.
  struct Places {
    int spans;
    const Lane *k[SPANS], *v[SPANS], *next[SPANS];  // next: keys of the following spans
  };

  // Those of group `g` of the tile's row, whose last span is `last`. The following ones are perhaps those of the next
  // tile, which begins with group `from` or later; their memory is fetched meanwhile.
  Places places(const Tile* tile, int64_t g, int64_t last, int64_t from, Kept& kept) const {
    const int64_t first = g * SPANS;
    Places found;
    found.spans = std::min<int64_t>(SPANS, last + 1 - first);
    const int spans = found.spans;
    const Tile* of = tile;
    int64_t block, inside;
    auto place = [&](int64_t span) {
      block = span, inside = 0;
      if (at.spans > 1) block = span / at.spans, inside = span % at.spans;  // divisions are slow
    };
    if (s.block_size % LANES) {
      gather(*tile, first, spans, found.k, found.v, kept.gathered);
      std::copy_n(found.k, spans, found.next);
      return found;
    }
    place(first);
    for (int c = 0; c < spans + SPANS && block < s.blocks; c++) {
      const int64_t span = (table[of->row * s.blocks + block] * s.kv_heads + of->kv_head) * at.spans + inside;
      const Lane* key = reinterpret_cast<const Lane*>(keys) + span * at.k_span;
      if (c < spans) {
        found.k[c] = found.next[c] = key;
        found.v[c] = reinterpret_cast<const Lane*>(values) + span * at.v_span;
      } else {
        found.next[c - spans] = key;
      }
      if (first + c == std::min(last, kept.stop)) {
        if (kept.after) of = kept.after, place(kept.after_span);
        else if (++of == work.tile() + work.tile_count()) break;
        else place(std::max(from, first_group(pos[of->first])) * SPANS);
      } else if (++inside == at.spans) {
        block++, inside = 0;
      }
    }
    return found;
  }

  // Groups `from` to before `to`, for all queries of a set at once. fresh: they are the first ones of this piece.
  void crowd(const Tile* tile, int64_t from, int64_t to, bool fresh, Kept& kept) const {
    if (from >= to) return;
    const Crowd<T> c(kept.crowd, kept.n, at.k_depth, at.v_wide);
    int64_t sees_least = std::numeric_limits<int64_t>::max(), sees_most = 0;
    for (int i = 0; i < c.wide; i++) {  // beyond the last query come its doubles
      const int r = std::min(i, kept.n - 1);
      for (int64_t d = 0; d < at.k_depth; d++) c.queries[d * c.wide + i] = kept.lanes[r * at.k_depth + d];
      for (int l = 0; l < LANES; l++) c.totals[l * c.wide + i] = kept.now->total[r][l];
      for (int64_t d = 0; !fresh && d < at.v_wide; d++) c.sums[d * c.wide + i] = row(*kept.now, r)[d];
      c.most[i] = kept.now->most[r], c.position[i] = kept.position[r];
      sees_least = std::min(sees_least, kept.position[r]), sees_most = std::max(sees_most, kept.position[r]);
    }
    if (fresh) std::fill_n(c.sums, at.v_wide * c.wide, 0.0f);
    for (int64_t g = from; g < to; g++) {
      const Places p = places(tile, g, span_of(sees_most), 0, kept);
      for (int i = 0; i < p.spans; i++) c.ask(p.v[i], at.v_span);
      c.score(p.k, p.spans, at.k_depth);
      const int64_t first = g * GROUP, end = first + p.spans * LANES;
      const bool hidden = sees_least + 1 < end || (s.window && sees_most - s.window >= first);
      if (!hidden && s.softcap == 0.0f) {
        c.weigh(p.spans, [&](Floats x, const Ints&, int) { return x * s.scale; });
      } else {
        c.weigh(p.spans, [&](Floats x, const Ints& position, int i) {
          x = x * s.scale;
          if (s.softcap != 0.0f) x = tanh(x / s.softcap) * s.softcap;
          const int32_t key = first + i;
          Ints sees = position >= key;
          if (s.window) sees &= position - (int32_t)std::min<int64_t>(s.window, 1 << 30) < key;
          return choose(sees, x, all(-std::numeric_limits<float>::infinity()));
        });
      }
      for (int i = 0; i < p.spans; i++) c.ask(p.next[i], at.k_span);
      c.mix(p.v, p.spans, at.v_wide);
    }
    for (int r = 0; r < kept.n; r++) {
      for (int l = 0; l < LANES; l++) kept.now->total[r][l] = c.totals[l * c.wide + r];
      for (int64_t d = 0; d < at.v_wide; d++) row(*kept.now, r)[d] = c.sums[d * c.wide + r];
      kept.now->most[r] = c.most[r];
    }
  }

  // Queries `begin` to before `end` see a group of the tile's row. The tile after it will begin with group `from` or
  // later.
  void group(const Tile* tile, int begin, int end, int64_t g, int64_t last, int64_t from, Kept& kept) const {
    const int64_t first = g * SPANS;
    const Places p = places(tile, g, last, from, kept);
    const int spans = p.spans;
    Element weights[TOGETHER][SPANS * LANES];
    float old[TOGETHER];
    const int some = up(end - begin, up(end - begin, QUERIES));
    for (int a = begin; a < end; a += some) {
      const int n = std::min(some, end - a);
      Floats scores[QUERIES][SPANS];
      with_constant<QUERIES>(n, [&](auto rows) {
        with_constant<SPANS>(spans, [&](auto wide) {
          score<T, rows, wide>(kept.lanes + a * at.k_depth, at.k_depth, p.k, p.v, scores);
        });
      });
      with_constant<SPANS>(spans, [&](auto wide) {
        for (int r = a; r < a + n; r++) old[r] = weigh<wide>(r, first, scores[r - a], kept, weights[r]);
      });
    }
    for (int64_t d = 0; d < at.v_wide; d += 4 * LANES) {
      const Lane *part[SPANS], *soon[SPANS];
      for (int c = 0; c < spans; c++) part[c] = p.v[c] + d, soon[c] = p.next[c] + d;
      for (int a = begin; a < end; a += some)
        with_constant<QUERIES>(std::min(some, end - a), [&](auto rows) {
          with_constant<4>(std::min<int64_t>(4, (at.v_wide - d) / LANES), [&](auto wide) {
            mix<T, rows, wide>(weights + a, old + a, part, soon, spans, at.v_wide, row(*kept.now, a) + d);
          });
        });
    }
  }

  // Scores to weights, and what the sums so far count now.
  template <int S>
  float weigh(int r, int64_t first, Floats* scores, Kept& kept, Element* weights) const {
    const int64_t position = kept.position[r];
    float& most = kept.now->most[r];
    const float none = -std::numeric_limits<float>::infinity();
    Floats high = all(none);
    for (int c = 0; c < S; c++) {
      Floats x = scores[c] * s.scale;
      if (s.softcap != 0.0f) x = tanh(x / s.softcap) * s.softcap;
      if (bias) x += by_distance(bias + kept.head[r] * reach, position - (first + c) * LANES);
      scores[c] = seen(x, position, (first + c) * LANES);
      high = larger(scores[c], high);
    }
    float before = most;
    most = std::max(most, largest(high));
    float zero = most == none ? 0.0f : most;  // nothing seen yet
    float old = 1.0f;
    if (most != before) {
      old = exp(all(before - zero))[0];
    }
    for (int c = 0; c < S; c++) T::keep(weights + c * LANES, T::weight(scores[c] - zero));
    constexpr int WHOLE = (S + T::DEPTH - 1) / T::DEPTH * T::DEPTH;  // spans in whole vectors of lanes
    for (int c = S; c < WHOLE; c++) T::keep(weights + c * LANES, Floats{});
    float* total = kept.now->total[r];
    store(total, added_up<T>(load<Floats>(total) * old, weights, WHOLE * LANES / T::DEPTH));
    return old;
  }

  // What a row of the bias adds to a span that begins `far` positions back: beyond its end it goes on in a straight
  // line.
  FAST Floats by_distance(const float* row, int64_t far) const {
    const int64_t last = reach - 1;
    const float end = row[last], slope = end - row[last - 1];
    if (far - (LANES - 1) > last) return end + slope * ((float)(far - last) - converted<Floats>(numbers()));
    float x[LANES];
    for (int64_t i = 0; i < LANES; i++) {
      const int64_t d = std::max<int64_t>(far - i, 0);  // less: a position ahead, which is hidden
      x[i] = d <= last ? row[d] : end + slope * (float)(d - last);
    }
    return load<Floats>(x);
  }

  // Scores of a span that begins at position `where`.
  FAST Floats seen(Floats x, int64_t position, int64_t where) const {
    const Ints lane = numbers();
    // Lanes from `low` to before `end`.
    int64_t end = std::clamp<int64_t>(position + 1 - where, 0, LANES);
    int64_t low = s.window ? std::clamp<int64_t>(position - s.window + 1 - where, 0, LANES) : 0;
    if (low == 0 && end == LANES) return x;
    return choose((lane >= (int)low) & (lane < (int)end), x, all(-std::numeric_limits<float>::infinity()));
  }
};

}  // namespace hibachi
