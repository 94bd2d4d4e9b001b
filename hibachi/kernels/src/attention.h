// Causal attention of packed queries over a paged cache, straight from the block table.
//
// A block keeps its positions in spans of 16 (the last one may be short; then spans are put together for attention).
// Keys [blocks, kv_heads, spans, dim / DEPTH, 16] lanes, where a lane holds neighbouring dimensions of one position;
// values [blocks, kv_heads, spans, 16 / DEPTH, dim], where a lane holds neighbouring positions of one dimension. So
// scores of 16 positions, and outputs of 16 dimensions, are one vector each, and nothing is added across lanes.
//
// A tile is some queries (tokens of one row, heads that share a key head) which pass together over the row's spans,
// four at a time, with a running maximum and sum (Milakov & Gimelshein 2018; Dao et al. 2022). The groups of four
// begin at fixed positions and each query's numbers go through the same operations in the same order in any tile:
// what others see beyond it counts as weights of zero, which change no bit.
//
// Tiles that see the same spans, of one prompt or of rows that share a prefix, may pass over these together, so that
// each group is read once for all of them (cascade attention; Juravsky et al. 2024). No results of parts are merged: a
// query takes its maximum and sum along, goes on by itself where the tables part, and has met the same groups in the
// same order as alone.

#pragma once

#include "lanes.h"
#include "memory.h"

namespace hibachi {

constexpr int SPANS = 4;      // that are looked at together
constexpr int QUERIES = 6;    // in a tile
constexpr int TOGETHER = 24;  // queries of a set: what is kept of them stays in the first cache, beside a group

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

  int64_t count() const { return s.tokens; }
  int64_t batch(int) const { return 16; }

  void operator()(int64_t t) const {
    constexpr int D = T::DEPTH;
    int64_t block = slot[t] / s.block_size, offset = slot[t] % s.block_size;
    for (int64_t h = 0; h < s.kv_heads; h++) {
      int64_t span = (block * s.kv_heads + h) * at.spans + offset / LANES, i = offset % LANES;
      const Element *key = k + t * s.k_stride + h * s.k_dim, *value = v + t * s.v_stride + h * s.v_dim;
      Element* to_key = keys + (span * at.k_span + i) * D;
      Element* to_value = values + (span * at.v_span + i / D * at.v_wide) * D + i % D;
      if (finite<T>(value, s.v_dim)) {
        for (int64_t d = 0; d < s.k_dim; d++) to_key[d / D * LANES * D + d % D] = key[d];
        for (int64_t d = 0; d < s.v_dim; d++) to_value[d * D] = value[d];
      } else {
        for (int64_t d = 0; d < s.k_dim; d++) to_key[d / D * LANES * D + d % D] = T::nan();
        for (int64_t d = 0; d < s.v_dim; d++) to_value[d * D] = Element{};
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

// Tiles `begin` to before `end`, which see the first `groups` groups of spans alike.
struct Set {
  int32_t begin, end;
  int64_t groups;
};

// The tiles of a step, and sets of them. Tiles of a row are neighbours, and so are rows whose tables begin alike; a set
// grows for as long as it saves more reads so. Without `cascade`, each tile is a set.
class Work {
 public:
  // Counts. Memory is asked for then: `ok`.
  Work(const Sizes& s, const int32_t* cu_q)
      : tiles(count(s, cu_q)), sets_(tiles.count), some(tiles.count / s.kv_heads) {}

  bool ok() const { return tiles.memory.ok() && sets_.ok() && some.ok(); }
  const Tile* tile() const { return tiles.memory.data(); }
  int64_t tile_count() const { return tiles.count; }
  const Set* set() const { return sets_.data(); }
  int64_t set_count() const { return found; }

  void fill(const Sizes& s, const int32_t* cu_q, const int32_t* pos, const int32_t* table, bool cascade, int threads) {
    const int64_t group = s.heads / s.kv_heads;
    auto less = [&](const Tile& a, const Tile& b) {
      if (a.row == b.row) return a.first != b.first ? a.first < b.first : a.head < b.head;
      const int32_t *x = table + a.row * s.blocks, *y = table + b.row * s.blocks;
      const auto [p, q] = std::mismatch(x, x + s.blocks, y);
      return p == x + s.blocks ? a.row < b.row : *p < *q;
    };
    auto seen = [&](const Tile& a) {  // groups that all of its tokens see to the end
      return pos[a.first] / (LANES * SPANS);
    };
    auto alike = [&](const Tile& a, const Tile& b) {
      const int64_t most = std::min(seen(a), seen(b));
      if (a.row == b.row) return most;
      const int64_t wanted = std::min(s.blocks, up(most * SPANS * LANES, s.block_size));
      const int32_t *x = table + a.row * s.blocks, *end = x + wanted;
      const int64_t blocks = std::mismatch(x, end, table + b.row * s.blocks).first - x;
      return std::min(most, blocks * s.block_size / (SPANS * LANES));
    };
    int64_t n = 0, made = 0;
    each_tile(s, cu_q, [&](const Tile& t) { some[n++] = t; });
    if (cascade) std::sort(some.data(), some.data() + n, less);
    const int64_t most = std::min<int64_t>(TOGETHER, cu_q[s.rows] * s.heads / (4 * threads));
    found = 0;
    for (int64_t i = 0, j; i < n; i = j) {
      int64_t queries = some[i].tokens * some[i].heads, groups = cascade ? seen(some[i]) : 0;
      for (j = i + 1; cascade && j < n && (queries += some[j].tokens * some[j].heads) <= most; j++) {
        const int64_t fewer = std::min(groups, alike(some[j - 1], some[j])), many = j - i;
        if (fewer * many <= groups * (many - 1)) break;
        groups = fewer;
      }
      for (int32_t h = 0; h < s.kv_heads; h++) {
        sets_[found++] = {int32_t(made), int32_t(made + j - i), groups};
        for (int64_t t = i; t < j; t++) {
          Tile& tile = tiles.memory[made++] = some[t];
          tile.kv_head = h, tile.head += h * group;
        }
      }
    }
  }

 private:
  struct Tiles {
    int64_t count;
    Buffer<Tile> memory;

    explicit Tiles(int64_t n) : count(n), memory(n) {}
  } tiles;
  Buffer<Set> sets_;
  Buffer<Tile> some;
  int64_t found = 0;

  static int64_t count(const Sizes& s, const int32_t* cu_q) {
    int64_t n = 0;
    each_tile(s, cu_q, [&](const Tile&) { n++; });
    return n * s.kv_heads;
  }
};

// From memory to the second cache. The first one waits for too few lines at a time: so it is a quarter faster.
inline void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

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

  // What is kept of queries between two groups.
  struct Kept {
    Lane* lanes;
    float* sums;
    Lane* gathered;  // spans, where blocks are no multiple of them
    int64_t position[TOGETHER], head[TOGETHER];
    Floats total[TOGETHER];
    float most[TOGETHER];
  };

  int64_t count() const { return work.set_count(); }
  // Neighbours go together, see `group`.
  int64_t batch(int threads) const { return std::max<int64_t>(1, count() / (16 * threads)); }
  int64_t scratch() const {
    const int64_t gathered = s.block_size % LANES ? SPANS * (at.k_span + at.v_span) : 0;
    return TOGETHER * at.v_wide * sizeof(float) + (TOGETHER * at.k_depth + gathered) * sizeof(Lane);
  }

  void operator()(int64_t i, char* scratch) const {
    const Set& set = work.set()[i];
    run(work.tile() + set.begin, work.tile() + set.end, set.groups, scratch);
  }

  static int64_t span_of(int64_t position) { return position / LANES; }

  int64_t first_group(int64_t position) const {
    return s.window ? span_of(std::max<int64_t>(0, position - s.window + 1)) / SPANS : 0;
  }

  // Tiles that see the groups before `alike` alike.
  void run(const Tile* begin, const Tile* end, int64_t alike, char* scratch) const {
    Kept kept;
    kept.sums = reinterpret_cast<float*>(scratch);
    kept.lanes = reinterpret_cast<Lane*>(kept.sums + TOGETHER * at.v_wide);
    kept.gathered = kept.lanes + TOGETHER * at.k_depth;
    int n = 0;
    for (const Tile* tile = begin; tile < end; tile++) n += tile->tokens * tile->heads;
    std::fill_n(kept.lanes, n * at.k_depth, Lane{});
    std::fill_n(kept.sums, n * at.v_wide, 0.0f);
    int r = 0;
    int64_t from = 0;  // the first group that all of them see
    for (const Tile* tile = begin; tile < end; tile++) {
      from = std::max(from, first_group(pos[tile->first]));
      each(*tile, [&](int64_t t, int64_t h) {
        std::memcpy(kept.lanes + r * at.k_depth, q + t * s.q_stride + h * s.k_dim, s.k_dim * sizeof(Element));
        kept.position[r] = pos[t], kept.head[r] = h;
        kept.most[r] = sinks ? sinks[h] : -std::numeric_limits<float>::infinity();
        kept.total[r] = sinks ? only(all(1.0f), 1, 0.0f) : Floats{};  // of exp(sink - most)
        r++;
      });
    }
    if (end - begin > 1) {
      alone(begin, end, 0, from, kept);
      for (int64_t g = from; g < alike; g++) group(begin, 0, n, g, span_of(kept.position[0]), 0, kept);
      from = std::max(from, alike);
    }
    alone(begin, end, from, std::numeric_limits<int64_t>::max(), kept);
    r = 0;
    for (const Tile* tile = begin; tile < end; tile++)
      each(*tile, [&](int64_t t, int64_t h) {
        Floats by = all(1.0f / sum(kept.total[r]));
        for (int64_t d = 0; d < s.v_dim; d += LANES) {
          Floats y = load<Floats>(&kept.sums[r * at.v_wide + d]) * by + 0.0f;  // no -0, which depends on added zeros
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

  // Queries `begin` to before `end` see a group of the tile's row. The tile after it will begin with group `from` or
  // later.
  void group(const Tile* tile, int begin, int end, int64_t g, int64_t last, int64_t from, Kept& kept) const {
    const int64_t first = g * SPANS;
    const int spans = std::min<int64_t>(SPANS, last + 1 - first);
    const Lane *k[SPANS], *v[SPANS], *next[SPANS];
    // Where the spans are, and the keys of the next ones, perhaps of the next tile, whose memory is fetched meanwhile.
    const Tile* of = tile;
    int64_t block, inside;
    auto place = [&](int64_t span) {
      block = span, inside = 0;
      if (at.spans > 1) block = span / at.spans, inside = span % at.spans;  // divisions are slow
    };
    if (s.block_size % LANES) {
      gather(*tile, first, spans, k, v, kept.gathered);
      std::copy_n(k, spans, next);
    } else {
      place(first);
      for (int c = 0; c < spans + SPANS && block < s.blocks; c++) {
        const int64_t span = (table[of->row * s.blocks + block] * s.kv_heads + of->kv_head) * at.spans + inside;
        const Lane* key = reinterpret_cast<const Lane*>(keys) + span * at.k_span;
        if (c < spans) k[c] = next[c] = key, v[c] = reinterpret_cast<const Lane*>(values) + span * at.v_span;
        else next[c - spans] = key;
        if (first + c == last) {
          if (++of == work.tile() + work.tile_count()) break;
          place(std::max(from, first_group(pos[of->first])) * SPANS);
        } else if (++inside == at.spans) {
          block++, inside = 0;
        }
      }
    }
    Element weights[TOGETHER][SPANS * LANES];
    float old[TOGETHER];
    const int some = up(end - begin, up(end - begin, QUERIES));
    for (int a = begin; a < end; a += some) {
      const int n = std::min(some, end - a);
      Floats scores[QUERIES][SPANS];
      with_constant<QUERIES>(n, [&](auto rows) {
        with_constant<SPANS>(spans, [&](auto wide) {
          score<T, rows, wide>(kept.lanes + a * at.k_depth, at.k_depth, k, v, scores);
        });
      });
      with_constant<SPANS>(spans, [&](auto wide) {
        for (int r = a; r < a + n; r++) old[r] = weigh<wide>(r, first, scores[r - a], kept, weights[r]);
      });
    }
    for (int64_t d = 0; d < at.v_wide; d += 4 * LANES) {
      const Lane *part[SPANS], *soon[SPANS];
      for (int c = 0; c < spans; c++) part[c] = v[c] + d, soon[c] = next[c] + d;
      for (int a = begin; a < end; a += some)
        with_constant<QUERIES>(std::min(some, end - a), [&](auto rows) {
          with_constant<4>(std::min<int64_t>(4, (at.v_wide - d) / LANES), [&](auto wide) {
            mix<T, rows, wide>(weights + a, old + a, part, soon, spans, at.v_wide, kept.sums + a * at.v_wide + d);
          });
        });
    }
  }

  // Scores to weights, and what the sums so far count now.
  template <int S>
  float weigh(int r, int64_t first, Floats* scores, Kept& kept, Element* weights) const {
    const int64_t position = kept.position[r];
    float& most = kept.most[r];
    Floats& total = kept.total[r];
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
      total = total * old;
    }
    Floats w[S];
    for (int c = 0; c < S; c++) w[c] = T::put(weights + c * LANES, exp(scores[c] - zero));
    for (int c = 0; c < S; c++) total += w[c];
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
