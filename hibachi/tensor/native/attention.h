// Causal attention of packed queries over a paged cache, straight from the block table.
//
// A block keeps its positions in spans of 16. Keys [blocks, kv_heads, spans, dim / DEPTH, 16] lanes, where a lane
// holds neighbouring dimensions of one position; values [blocks, kv_heads, spans, 16 / DEPTH, dim], where a lane holds
// neighbouring positions of one dimension. So scores of 16 positions, and outputs of 16 dimensions, are one vector
// each, and nothing is added across lanes.
//
// A tile is some queries (tokens of one row, heads that share a key head) which pass together over the row's spans,
// four at a time, with a running maximum and sum (Milakov & Gimelshein 2018; Dao et al. 2022). The groups of four
// begin at fixed positions and each query's numbers go through the same operations in the same order in any tile:
// what others see beyond it counts as weights of zero, which change no bit.

#pragma once

#include "lanes.h"

namespace hibachi {

constexpr int SPANS = 4;  // that are looked at together
#ifdef AVX512
constexpr int QUERIES = REGISTERS / SPANS;  // in a tile
#else
constexpr int QUERIES = 2;
#endif

struct Sizes {
  int64_t tokens, rows, heads, kv_heads, k_dim, v_dim, blocks, block_size;  // blocks: columns of the block table
  int64_t q_stride, k_stride, v_stride;                                     // elements from token to token
  int64_t window;                                                           // 0: all positions
  float scale, softcap;                                                     // softcap 0: none
};

static inline int64_t up(int64_t n, int64_t of) { return (n + of - 1) / of; }

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

// The new keys and values go to their places, before anybody reads: rows may share blocks that are written now.
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
      const Element* from = k + t * s.k_stride + h * s.k_dim;
      Element* to = keys + (span * at.k_span + i) * D;
      for (int64_t d = 0; d < s.k_dim; d++) to[d / D * LANES * D + d % D] = from[d];
      from = v + t * s.v_stride + h * s.v_dim;
      to = values + (span * at.v_span + i / D * at.v_wide) * D + i % D;
      for (int64_t d = 0; d < s.v_dim; d++) to[d * D] = from[d];
    }
  }
};

// Some tokens of a row, for some of the query heads that share a key head.
struct Tile {
  int32_t row, first, tokens, kv_head, head, heads;
};

static std::vector<Tile> tiles(const Sizes& s, const int32_t* cu_q) {
  int group = s.heads / s.kv_heads, parts = up(group, QUERIES), most = up(group, parts);
  std::vector<Tile> all;
  for (int32_t row = 0; row < s.rows; row++)
    for (int32_t t = cu_q[row], end = cu_q[row + 1], n; t < end; t += n) {
      n = std::min(std::max(1, QUERIES / most), end - t);
      for (int32_t h = 0; h < s.kv_heads; h++)
        for (int32_t g = 0; g < group; g += most)
          all.push_back({row, t, n, h, h * group + g, std::min(most, group - g)});
    }
  return all;
}

// Scores [N queries][S spans] of 16 positions each. Meanwhile what is needed next, `soon`, is fetched from memory.
template <class T, int N, int S>
static void score(
    const typename T::Lane* q,
    int64_t depth,
    const typename T::Lane* const* keys,
    const typename T::Lane* const* soon,
    Floats (*out)[SPANS]
) {
  Floats sums[N][S] = {};
  for (int64_t d = 0; d < depth; d++)
    for (int c = 0; c < S; c++) {
      Words k = load<Words>(keys[c] + d * LANES);
      __builtin_prefetch(soon[c] + d * LANES);
      for (int r = 0; r < N; r++) sums[r][c] = T::multiply(sums[r][c], k, q[r * depth + d]);
    }
  for (int r = 0; r < N; r++)
    for (int c = 0; c < S; c++) out[r][c] = sums[r][c];
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
  Floats sums[N][C];
  for (int r = 0; r < N; r++)
    for (int c = 0; c < C; c++) sums[r][c] = load<Floats>(out + r * wide + c * LANES) * old[r];
  for (int s = 0; s < spans; s++)
    for (int i = 0; i < LANES / T::DEPTH; i++) {
      Words v[C];
      for (int c = 0; c < C; c++) {
        v[c] = load<Words>(values[s] + i * wide + c * LANES);
        __builtin_prefetch(soon[s] + i * wide + c * LANES);
      }
      for (int r = 0; r < N; r++) {
        auto w = load<typename T::Lane>(weights[r] + s * LANES + i * T::DEPTH);
        for (int c = 0; c < C; c++) sums[r][c] = T::multiply(sums[r][c], v[c], w);
      }
    }
  for (int r = 0; r < N; r++)
    for (int c = 0; c < C; c++) store(out + r * wide + c * LANES, sums[r][c]);
}

template <class T>
struct Attention {
  using Element = typename T::Element;
  using Lane = typename T::Lane;

  const Sizes& s;
  const Layout<T> at;
  const Element *q, *keys, *values;
  const int32_t *pos, *table;
  Element* out;
  const std::vector<Tile>& work;

  int64_t count() const { return work.size(); }
  int64_t batch(int) const { return 1; }
  void operator()(int64_t i) const { run(work[i]); }

  int64_t span_of(int64_t position) const {
    return position / s.block_size * at.spans + position % s.block_size / LANES;
  }

  int64_t first_span(int64_t position) const {
    return s.window ? span_of(std::max<int64_t>(0, position - s.window + 1)) : 0;
  }

  void run(const Tile& tile) const {
    const int n = tile.tokens * tile.heads;
    thread_local std::vector<Lane> lanes;
    thread_local std::vector<float> sums;
    lanes.assign(n * at.k_depth, Lane{});
    sums.assign(n * at.v_wide, 0.0f);
    int64_t position[QUERIES];
    Floats total[QUERIES] = {};
    float most[QUERIES];
    for (int r = 0; r < n; r++) {
      int64_t t = tile.first + r / tile.heads, h = tile.head + r % tile.heads;
      std::memcpy(lanes.data() + r * at.k_depth, q + t * s.q_stride + h * s.k_dim, s.k_dim * sizeof(Element));
      position[r] = pos[t];
      most[r] = -std::numeric_limits<float>::infinity();
    }
    // Positions rise within a tile.
    for (int64_t g = first_span(position[0]) / SPANS * SPANS, last = span_of(position[n - 1]); g <= last; g += SPANS)
      group(tile, n, g, last, lanes.data(), position, most, total, sums.data());
    for (int r = 0; r < n; r++) {
      int64_t t = tile.first + r / tile.heads, h = tile.head + r % tile.heads;
      Floats by = all(1.0f / sum(total[r]));
      for (int64_t d = 0; d < s.v_dim; d += LANES) {
        Floats y = load<Floats>(&sums[r * at.v_wide + d]) * by + 0.0f;  // no -0, which depends on added zeros
        write_some<T>(out + (t * s.heads + h) * s.v_dim + d, y, s.v_dim - d);
      }
    }
  }

  void group(
      const Tile& tile,
      int n,
      int64_t first,
      int64_t last,
      const Lane* lanes,
      const int64_t* position,
      float* most,
      Floats* total,
      float* sums
  ) const {
    const int spans = std::min<int64_t>(SPANS, last + 1 - first);
    const Lane *k[SPANS], *v[SPANS], *next[SPANS];
    int64_t begin[SPANS];
    int valid[SPANS];
    // Where the spans are, and the keys of the next ones, whose memory is fetched meanwhile.
    const int32_t* blocks = table + tile.row * s.blocks;
    int64_t block = first, inside = 0;
    if (at.spans > 1) block = first / at.spans, inside = first % at.spans;  // divisions are slow
    for (int c = 0; c < 2 * SPANS; c++) {
      int64_t span = (blocks[block] * s.kv_heads + tile.kv_head) * at.spans + inside;
      const Lane* key = reinterpret_cast<const Lane*>(keys) + span * at.k_span;
      if (c < spans) {
        k[c] = next[c] = key;
        v[c] = reinterpret_cast<const Lane*>(values) + span * at.v_span;
        begin[c] = block * s.block_size + inside * LANES;
        valid[c] = std::min<int64_t>(LANES, s.block_size - inside * LANES);
      } else {
        next[c - spans] = key;
      }
      if (first + c == last || c - spans == SPANS - 1) break;
      if (++inside == at.spans) block++, inside = 0;
    }
    Floats scores[QUERIES][SPANS];
    with_constant<QUERIES>(n, [&](auto rows) {
      with_constant<SPANS>(spans, [&](auto wide) { score<T, rows, wide>(lanes, at.k_depth, k, v, scores); });
    });
    Element weights[QUERIES][SPANS * LANES];
    float old[QUERIES];
    for (int r = 0; r < n; r++) old[r] = weigh(position[r], begin, valid, spans, scores[r], most[r], total[r], weights[r]);
    for (int64_t d = 0; d < at.v_wide; d += 4 * LANES) {
      const Lane *part[SPANS], *soon[SPANS];
      for (int c = 0; c < spans; c++) part[c] = v[c] + d, soon[c] = next[c] + d;
      with_constant<QUERIES>(n, [&](auto rows) {
        with_constant<4>(std::min<int64_t>(4, (at.v_wide - d) / LANES), [&](auto wide) {
          mix<T, rows, wide>(weights, old, part, soon, spans, at.v_wide, sums + d);
        });
      });
    }
  }

  // Scores to weights, and what the sums so far count now.
  float weigh(
      int64_t position, const int64_t* begin, const int* valid, int spans, Floats* scores, float& most, Floats& total, Element* weights
  ) const {
    const float none = -std::numeric_limits<float>::infinity();
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Floats high = all(none);
    for (int c = 0; c < spans; c++) {
      Floats x = scores[c] * s.scale;
      if (s.softcap != 0.0f) x = tanh(x / s.softcap) * s.softcap;
      // Lanes from `low` to before `end` are seen.
      int64_t end = std::clamp<int64_t>(position + 1 - begin[c], 0, valid[c]);
      int64_t low = s.window ? std::clamp<int64_t>(position - s.window + 1 - begin[c], 0, LANES) : 0;
      if (low > 0 || end < LANES) x = (lane >= (int)low) & (lane < (int)end) ? x : all(none);
      scores[c] = x;
      high = larger(x, high);
    }
    float before = most;
    most = std::max(most, largest(high));
    float zero = most == none ? 0.0f : most;  // nothing seen yet
    float old = 1.0f;
    if (most != before) {
      old = exp(all(before - zero))[0];
      total = total * old;
    }
    for (int c = 0; c < spans; c++) {
      Floats w = T::rounded(exp(scores[c] - zero));
      T::write(weights + c * LANES, w);
      total += w;
    }
    return old;
  }
};

}  // namespace hibachi
