// The few-row operations of decoding on a CPU, which dspark/kernels/cpu.py compiles: for AVX512-BF16, or for AVX2.
//
// Every row is computed alike however many rows stand beside it: one order of sums, one rounding. So verifying a token
// gives bit for bit what decoding it alone gives. Sums are float32; what leaves an operation is rounded once.
// Axes: N rows (tokens of any requests), K inputs, O outputs, h query heads, g key heads, d head size, L cache places.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/vec.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using bf16 = at::BFloat16;
using Float = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Float::size();  // 16, or 8 with AVX2

Float load(const bf16* at) {
  Float x;
  at::vec::load_fp32_from_bf16(at, x);
  return x;
}

Float load(const bf16* at, int64_t count) {  // the lanes from count on are 0
  if (count >= kLanes) return load(at);
  bf16 part[kLanes] = {};
  std::copy_n(at, count, part);
  return load(part);
}

struct Fetch {  // what the hardware is to bring near meanwhile, `step` bytes for each pair of inputs
  const char* from;
  int64_t step;
};

#ifdef CPU_CAPABILITY_AVX512

void store(bf16* at, Float x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), (__m256i)_mm512_cvtneps_pbh(x));
}

// ---- AVX512-BF16: products of pairs

constexpr int64_t kColumns = 32;  // outputs of one block of weights: two registers
constexpr int kRows = 12;         // rows that share one reading of a block: 24 accumulators of 32 registers
constexpr int together(int) { return 1; }
constexpr int64_t ahead(int64_t) { return 0; }

// x [N, K] times a block of weights [K/2, 32, 2] -> [N, 32]
template <int N, int>
void multiply(const bf16* x, const bf16* w, int64_t K, Fetch, float* out) {
  __m512 sum[N][2];  // in registers, for which gcc has to unroll the loops over it early
#pragma GCC unroll 12
  for (int n = 0; n < N; ++n) sum[n][0] = sum[n][1] = _mm512_setzero_ps();
  for (int64_t k = 0; k < K; k += 2, w += 2 * kColumns) {
    const __m512bh left = (__m512bh)_mm512_loadu_si512(w), right = (__m512bh)_mm512_loadu_si512(w + kColumns);
#pragma GCC unroll 12
    for (int n = 0; n < N; ++n) {
      int pair;
      std::memcpy(&pair, x + n * K + k, sizeof pair);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      sum[n][0] = _mm512_dpbf16_ps(sum[n][0], both, left);
      sum[n][1] = _mm512_dpbf16_ps(sum[n][1], both, right);
    }
  }
#pragma GCC unroll 12
  for (int n = 0; n < N; ++n) {
    _mm512_storeu_ps(out + n * kColumns, sum[n][0]);
    _mm512_storeu_ps(out + n * kColumns + kLanes, sum[n][1]);
  }
}

using Left = bf16;

// x [N, K] as `multiply` takes `group` rows of it
const bf16* arranged(const bf16* x, int64_t, int64_t, int64_t, std::vector<Left>&) { return x; }

// 16 registers -> the sum of each, in order
__m512 sums(const __m512 (&x)[kLanes]) {
  __m512 two[8], four[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    two[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(two[2 * i]), b = _mm512_castps_pd(two[2 * i + 1]);
    four[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const auto halves = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return halves(halves(four[0], four[1]), halves(four[2], four[3]));
}

// q [R, d] times keys [L, d], their rows `apart` and `step` apart -> scores [R, room], those beyond L of some key
template <int d, int R>
void score(const bf16* q, int64_t apart, const bf16* keys, int64_t step, int64_t L, float* scores, int64_t room) {
  constexpr int parts = d / 32;
  for (int r = 0; r < R; ++r, q += apart, scores += room) {
    __m512bh query[parts];
    for (int p = 0; p < parts; ++p) query[p] = (__m512bh)_mm512_loadu_si512(q + 32 * p);
    for (int64_t t = 0; t < L; t += kLanes) {
      __m512 dots[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const bf16* key = keys + std::min(t + i, L - 1) * step;
        dots[i] = _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int p = 0; p < parts; ++p)
          dots[i] = _mm512_dpbf16_ps(dots[i], query[p], (__m512bh)_mm512_loadu_si512(key + 32 * p));
      }
      _mm512_storeu_ps(scores + t, sums(dots));
    }
  }
}

#else

void store(bf16* at, Float x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at), at::vec::cvtfp32_bf16(__m256(x)));
}

// ---- AVX2: products in float32 of weights that are bfloat16 in memory

constexpr int64_t kColumns = 16;  // outputs of one block of weights: two registers, and a pair of inputs a cache line
constexpr int kRows = 6;          // rows that share one reading of a block: 12 accumulators of 16 registers
constexpr int together(int rows) { return rows <= 2 ? 2 : 1; }  // blocks, so that no addition waits for the one before
constexpr int64_t ahead(int64_t rows) { return rows <= 2 ? 512 : 2048; }  // weights to fetch before their turn

// Of a pair of bfloat16 the upper half is the odd one. In memory, for the accumulators leave no register for it.
alignas(32) const volatile int kUpper[kLanes] = {-65536, -65536, -65536, -65536, -65536, -65536, -65536, -65536};

// x [K/2, N, 2] times B blocks of weights, each [K/2, 16, 2] -> [B, N, 16]. Even weights are done before odd ones are
// looked at: both at once would not fit the registers.
template <int N, int B>
void multiply(const float* x, const bf16* w, int64_t K, Fetch fetch, float* out) {
  constexpr int C = 2 * B;
  __m256 sum[N][C];
#pragma GCC unroll 6
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) sum[n][c] = _mm256_setzero_ps();
  const auto at = [&](int c) { return reinterpret_cast<const __m256i*>(w + c / 2 * K * kColumns) + c % 2; };
  for (int64_t k = 0; k < K; k += 2, x += 2 * N, w += 2 * kColumns, fetch.from += fetch.step) {
    __m256 part[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      if (c % 2 == 0) _mm_prefetch(fetch.from + c * K * kColumns, _MM_HINT_T0);
      part[c] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(at(c)), 16));
    }
#pragma GCC unroll 6
    for (int n = 0; n < N; ++n) {
      const __m256 both = _mm256_broadcast_ss(x + 2 * n);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sum[n][c] = _mm256_fmadd_ps(both, part[c], sum[n][c]);
    }
    asm volatile("" ::: "memory");  // the odd weights are read again, not kept
    const __m256i upper = *reinterpret_cast<const volatile __m256i*>(kUpper);
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) part[c] = _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(at(c)), upper));
#pragma GCC unroll 6
    for (int n = 0; n < N; ++n) {
      const __m256 both = _mm256_broadcast_ss(x + 2 * n + 1);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sum[n][c] = _mm256_fmadd_ps(both, part[c], sum[n][c]);
    }
  }
#pragma GCC unroll 6
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) _mm256_storeu_ps(out + (c / 2 * N + n) * kColumns + c % 2 * kLanes, sum[n][c]);
}

using Left = float;

// x [N, K] as `multiply` takes `group` rows of it: each group [K/2, rows, 2], kept in `room`
const float* arranged(const bf16* x, int64_t N, int64_t K, int64_t group, std::vector<Left>& room) {
  room.resize(N * K);
  std::vector<float> row(K);
  for (int64_t n = 0; n < N; ++n) {
    const int64_t first = n - n % group, count = std::min(group, N - first);
    at::vec::convert(x + n * K, row.data(), K);
    for (int64_t k = 0; k < K; k += 2) std::copy_n(&row[k], 2, &room[first * K + k * count + 2 * (n - first)]);
  }
  return room.data();
}

// 4 registers -> the sum of each, in order
__m128 sums(const Float (&x)[4]) {
  const __m256 halves = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

// q [R, d] times keys [L, d], their rows `apart` and `step` apart -> scores [R, room]
template <int d, int R>
void score(const bf16* q, int64_t apart, const bf16* keys, int64_t step, int64_t L, float* scores, int64_t room) {
  float query[R][d];
  for (int r = 0; r < R; ++r) at::vec::convert(q + r * apart, query[r], d);
  for (int64_t t = 0; t < L; ++t, keys += step) {
    Float key[d / kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < d / kLanes; ++i) key[i] = load(keys + i * kLanes);
    Float dots[4] = {0, 0, 0, 0};
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      Float dot[2] = {0, 0};
#pragma GCC unroll 16
      for (int i = 0; i < d / kLanes; ++i)
        dot[i % 2] = at::vec::fmadd(Float::loadu(query[r] + i * kLanes), key[i], dot[i % 2]);
      dots[r] = dot[0] + dot[1];
    }
    alignas(16) float of_rows[4];
    _mm_store_ps(of_rows, sums(dots));
    for (int r = 0; r < R; ++r) scores[r * room + t] = of_rows[r];
  }
}

#endif

// ---- the operations

using Multiply = void (*)(const Left*, const bf16*, int64_t, Fetch, float*);
template <int... N>
constexpr std::array<std::array<Multiply, 2>, kRows> multiplies(std::integer_sequence<int, N...>) {
  return {{{multiply<N + 1, 1>, multiply<N + 1, together(N + 1)>}...}};
}
constexpr auto kMultiply = multiplies(std::make_integer_sequence<int, kRows>());

// x [N, K] as `arranged` in groups of rows, times blocks `begin` to `end` of the weights -> their columns of out [N, O]
void products(const Left* x, const bf16* w, int64_t N, int64_t K, int64_t O, int64_t group, int64_t begin, int64_t end,
              bf16* out) {
  float tile[2 * kRows * kColumns];
  const int64_t size = K * kColumns, passes = (N + group - 1) / group;
  for (int64_t block = begin, blocks; block < end; block += blocks) {
    blocks = std::min<int64_t>(together(group), end - block);
    for (int64_t n = 0; n < N; n += group) {
      const int64_t rows = std::min(group, N - n);
      // Of several passes each fetches its share of the next block, so that reading from memory never stops.
      const bf16* near = w + block * size + (passes == 1 ? ahead(rows) : size + n / group * size / passes);
      const Fetch fetch{reinterpret_cast<const char*>(near), (64 + passes - 1) / passes};
      kMultiply[rows - 1][blocks > 1](x + n * K, w + block * size, K, fetch, tile);
      for (int64_t i = 0; i < blocks * rows; ++i) {
        const int64_t column = (block + i / rows) * kColumns;
        at::vec::convert(tile + i * kColumns, out + (n + i % rows) * O + column, std::min(kColumns, O - column));
      }
    }
  }
}

// x [..., K], weight [blocks, K/2, kColumns, 2] -> [..., O]
Tensor linear(const Tensor& x, const Tensor& weight, int64_t O) {
  const Tensor rows = x.contiguous();
  const int64_t K = 2 * weight.size(1);
  TORCH_CHECK(K > 0 && x.size(-1) == K, "x has ", x.size(-1), " columns, the weight takes ", K);
  const int64_t N = rows.numel() / K, passes = (N + kRows - 1) / kRows;
  auto shape = x.sizes().vec();
  shape.back() = O;
  Tensor out = at::empty(shape, x.options());
  if (!N) return out;
  const int64_t group = (N + passes - 1) / passes;  // as equal as can be
  std::vector<Left> room;
  const Left* from = arranged(rows.const_data_ptr<bf16>(), N, K, group, room);
  const bf16* w = weight.const_data_ptr<bf16>();
  bf16* to = out.mutable_data_ptr<bf16>();
  at::parallel_for(0, weight.size(0), 1,
                   [&](int64_t begin, int64_t end) { products(from, w, N, K, O, group, begin, end, to); });
  return out;
}

// x [H] (+ delta [H], left in total) -> its RMS norm
void norm_row(const bf16* x, const bf16* delta, bf16* total, const bf16* weight, int64_t H, double eps, bf16* out) {
  Float squares(0);
  for (int64_t i = 0; i < H; i += kLanes) {
    Float part = load(x + i);
    if (delta) {
      store(total + i, part + load(delta + i));
      part = load(total + i);  // what later layers add to is the rounded sum
    }
    squares = at::vec::fmadd(part, part, squares);
  }
  const Float scale(1 / std::sqrt(squares.reduce_add() / H + static_cast<float>(eps)));
  const bf16* from = delta ? total : x;
  for (int64_t i = 0; i < H; i += kLanes) store(out + i, load(from + i) * scale * load(weight + i));
}

// x [..., H], delta [..., H], weight [H] -> x + delta, its RMS norm; without delta x itself
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const std::optional<Tensor>& delta, const Tensor& weight,
                                        double eps) {
  const Tensor rows = x.contiguous(), added = delta ? delta->contiguous() : rows;
  const int64_t H = weight.numel();
  TORCH_CHECK(H > 0 && H % 16 == 0 && x.size(-1) == H, "rows of ", x.size(-1), ", a weight of ", H,
              ": a multiple of 16 fits");
  TORCH_CHECK(added.sizes() == x.sizes(), "x and what is added to it have different shapes");
  Tensor total = delta ? at::empty_like(rows) : rows, out = at::empty_like(rows);
  const bf16 *from = rows.const_data_ptr<bf16>(), *add = delta ? added.const_data_ptr<bf16>() : nullptr;
  bf16 *sum = delta ? total.mutable_data_ptr<bf16>() : nullptr, *to = out.mutable_data_ptr<bf16>();
  for (int64_t i = 0; i < rows.numel(); i += H)
    norm_row(from + i, add ? add + i : nullptr, sum ? sum + i : nullptr, weight.const_data_ptr<bf16>(), H, eps, to + i);
  return {total, out};
}

// gate and up side by side [..., 2I] -> silu(gate) * up [..., I]
Tensor silu_mul(const Tensor& gate_up) {
  const int64_t I = gate_up.size(-1) / 2;
  TORCH_CHECK(I > 0 && I % 16 == 0 && gate_up.is_contiguous(), "gates of ", I, ": a multiple of 16, contiguous, is needed");
  auto shape = gate_up.sizes().vec();
  shape.back() = I;
  Tensor out = at::empty(shape, gate_up.options());
  const bf16* from = gate_up.const_data_ptr<bf16>();
  bf16* to = out.mutable_data_ptr<bf16>();
  at::parallel_for(0, out.numel() / kLanes, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const int64_t n = part * kLanes / I, i = part * kLanes % I;
      const Float gate = load(from + 2 * n * I + i), up = load(from + (2 * n + 1) * I + i);
      store(to + n * I + i, gate / (Float(1) + gate.neg().exp_u20()) * up);
    }
  });
  return out;
}

// ---- attention of rows, each at its own place of its own request

struct Rotary {
  const float *cos, *sin;  // of one position, [d]
  int64_t d;

  // half-split pairs (Llama, Qwen); x and out may be the same
  void turn(const bf16* x, bf16* out) const {
    const auto at = [](const float* table, int64_t i) { return Float::loadu(table + i); };
    for (int64_t i = 0, j = d / 2; i < d / 2; i += kLanes, j += kLanes) {
      const Float a = load(x + i), b = load(x + j);
      store(out + i, at::vec::fmsub(a, at(cos, i), b * at(sin, i)));
      store(out + j, at::vec::fmadd(b, at(cos, j), a * at(sin, j)));
    }
  }
};

// scores [L rounded up to 16] -> weights [same], those beyond L 0, before the division by their sum; one over it
float weigh(float* scores, int64_t L, int64_t d) {
  std::fill(scores + L, scores + (L + 15) / 16 * 16, -INFINITY);
  const Float scale(1 / std::sqrt(static_cast<float>(d)));
  Float highest(-INFINITY), weights(0);
  for (int64_t t = 0; t < L; t += kLanes) {
    const Float scaled = Float::loadu(scores + t) * scale;
    highest = at::vec::maximum(highest, scaled);
    scaled.store(scores + t);
  }
  const Float most(highest.reduce_max());
  for (int64_t t = 0; t < L; t += kLanes) {
    const Float weight = (Float::loadu(scores + t) - most).exp_u20();  // of -inf it is 0
    weights = weights + weight;
    weight.store(scores + t);
  }
  return 1 / weights.reduce_add();
}

// R rows q [R, d], `apart` from each other, of which row r sees the first L[r] of the keys and values [., d], `step`
// apart -> out [R, d], as far apart as q; scores: room for R times the most of L, rounded up to 16. The rows share each
// reading of a key or value, nothing else.
template <int d, int R>
void attend_rows(const bf16* q, int64_t apart, const bf16* keys, const bf16* values, int64_t step, const int64_t* L,
                 float* scores, bf16* out) {
  const int64_t most = *std::max_element(L, L + R), fewest = *std::min_element(L, L + R), room = (most + 15) / 16 * 16;
  score<d, R>(q, apart, keys, step, most, scores, room);
  float share[R];
  for (int r = 0; r < R; ++r) share[r] = weigh(scores + r * room, L[r], d);
  constexpr int width = std::min<int>(d, 8 / R * kLanes), parts = width / kLanes;  // of values at a time: 8 accumulators
  for (int start = 0; start < d; start += width) {
    Float sum[R][parts];
#pragma GCC unroll 8
    for (int i = 0; i < R * parts; ++i) sum[i / parts][i % parts] = Float(0);
    const bf16* value = values + start;
    for (int64_t t = 0; t < fewest; ++t, value += step)
#pragma GCC unroll 8
      for (int p = 0; p < parts; ++p) {
        const Float part = load(value + kLanes * p);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[r][p] = at::vec::fmadd(Float(scores[r * room + t]), part, sum[r][p]);
      }
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < parts; ++p) {
        for (int64_t t = fewest; t < L[r]; ++t)  // what the other rows may not see
          sum[r][p] = at::vec::fmadd(Float(scores[r * room + t]), load(values + t * step + start + kLanes * p), sum[r][p]);
        store(out + r * apart + start + kLanes * p, sum[r][p] * Float(share[r]));
      }
  }
}

using Attend = void (*)(const bf16*, int64_t, const bf16*, const bf16*, int64_t, const int64_t*, float*, bf16*);
constexpr int kShared = 4;  // rows of one request that share a reading of its keys and values
template <int d>
constexpr Attend kAttend[] = {attend_rows<d, 1>, attend_rows<d, 2>, attend_rows<d, 3>, attend_rows<d, 4>};

// qkv [N, (h + 2g) d] of rows at `positions` [N] of `requests` [N]: turns queries and keys (normed first, where q_norm
// and k_norm [d] are given), leaves keys and values in the caches [B, g, max_len, d], and lets row i see the first
// visible[i] places of its request -> [N, h d]
Tensor attend(const Tensor& qkv, const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm, double eps,
              const Tensor& cos, const Tensor& sin, const Tensor& positions, const Tensor& requests,
              const Tensor& visible, const Tensor& cache_k, const Tensor& cache_v) {
  const int64_t N = positions.size(0), g = cache_k.size(1), d = cache_k.size(3), h = qkv.size(-1) / d - 2 * g;
  TORCH_CHECK(d == 64 || d == 128, "head size ", d, ": 64 or 128");
  TORCH_CHECK(qkv.dim() == 2 && qkv.size(0) == N && qkv.size(1) % d == 0 && h >= 0 && h % g == 0, "qkv does not fit");
  TORCH_CHECK(requests.numel() == N && visible.numel() == N, "one request and one visible length a row");
  TORCH_CHECK(qkv.is_contiguous() && cache_k.stride(3) == 1 && cos.is_contiguous() && sin.is_contiguous());
  TORCH_CHECK(cache_k.strides() == cache_v.strides(), "keys and values lie differently");
  Tensor turned = at::empty({N, h * d}, qkv.options()), out = at::empty({N, h * d}, qkv.options());
  if (!N) return out;
  const bf16* from = qkv.const_data_ptr<bf16>();
  bf16 *queries = turned.mutable_data_ptr<bf16>(), *to = out.mutable_data_ptr<bf16>();
  bf16 *ks = cache_k.mutable_data_ptr<bf16>(), *vs = cache_v.mutable_data_ptr<bf16>();
  const Tensor where[] = {positions.contiguous(), requests.contiguous(), visible.contiguous()};
  const int64_t *at = where[0].const_data_ptr<int64_t>(), *request = where[1].const_data_ptr<int64_t>();
  const int64_t* sees = where[2].const_data_ptr<int64_t>();
  const auto [least_request, most_request] = std::minmax_element(request, request + N);
  const auto [first, last] = std::minmax_element(at, at + N);
  const auto [fewest, most] = std::minmax_element(sees, sees + N);
  TORCH_CHECK(*least_request >= 0 && *most_request < cache_k.size(0), "a request has no row in the cache");
  TORCH_CHECK(*first >= 0 && (!h || *fewest > 0), "a row stands before the first place, or sees none");
  TORCH_CHECK(std::max(*most, *last + 1) <= cache_k.size(2) && *last < cos.size(0), "the cache is too short");
  const auto place = [&](const Tensor& cache, int64_t b, int64_t head, int64_t t) {
    return b * cache.stride(0) + head * cache.stride(1) + t * cache.stride(2);
  };
  for (int64_t n = 0; n < N; ++n) {
    const Rotary rotary{cos.const_data_ptr<float>() + at[n] * d, sin.const_data_ptr<float>() + at[n] * d, d};
    for (int64_t head = 0; head < h + g; ++head) {
      const bool key = head >= h;
      const auto& norm = key ? k_norm : q_norm;
      const bf16* x = from + (n * (h + 2 * g) + head) * d;
      bf16* result = key ? ks + place(cache_k, request[n], head - h, at[n]) : queries + (n * h + head) * d;
      if (norm) norm_row(x, nullptr, nullptr, norm->const_data_ptr<bf16>(), d, eps, result);
      rotary.turn(norm ? result : x, result);
    }
    for (int64_t head = 0; head < g; ++head)
      std::memcpy(vs + place(cache_v, request[n], head, at[n]), from + (n * (h + 2 * g) + h + g + head) * d, 2 * d);
  }
  std::vector<std::pair<int64_t, int64_t>> runs;  // of neighbours in one request: the first, how many
  for (int64_t n = 0; n < N; n += runs.back().second) {
    int64_t count = 1;
    while (count < kShared && n + count < N && request[n + count] == request[n]) ++count;
    runs.emplace_back(n, count);
  }
  at::parallel_for(0, runs.size() * h, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(kShared * (*most + 16));
    for (int64_t i = begin; i < end; ++i) {
      const auto [n, count] = runs[i / h];
      const int64_t head = i % h / (h / g), row = (n * h + i % h) * d;
      (d == 64 ? kAttend<64> : kAttend<128>)[count - 1](
          queries + row, h * d, ks + place(cache_k, request[n], head, 0), vs + place(cache_v, request[n], head, 0),
          cache_k.stride(2), sees + n, scores.data(), to + row);
    }
  });
  return out;
}

// ---- the best token: logits [..., V] -> the first of the highest [...]; some token where one is NaN

Tensor argmax(const Tensor& logits) {
  const Tensor rows = logits.contiguous();
  const int64_t V = rows.size(-1), N = rows.numel() / std::max<int64_t>(V, 1);
  TORCH_CHECK(V > 0, "no logits");
  Tensor out = at::empty(logits.sizes().slice(0, logits.dim() - 1), logits.options().dtype(at::kLong));
  int64_t* to = out.mutable_data_ptr<int64_t>();
  at::parallel_for(0, N, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const bf16* row = rows.const_data_ptr<bf16>() + n * V;
      Float highest(-INFINITY);
      int64_t i = 0;
      for (; i + kLanes <= V; i += kLanes) highest = at::vec::maximum(highest, load(row + i));
      if (i < V) highest = at::vec::maximum(highest, Float::set(highest, load(row + i, V - i), V - i));
      const bf16* found = std::find(row, row + V, bf16(highest.reduce_max()));
      to[n] = found == row + V ? 0 : found - row;
    }
  });
  return out;
}

// ---- logits [..., V] over a temperature -> probabilities [..., V], float32

Tensor probabilities(const Tensor& logits, double temperature) {
  const Tensor rows = logits.contiguous();
  const int64_t V = rows.size(-1), N = rows.numel() / std::max<int64_t>(V, 1);
  TORCH_CHECK(V > 0 && temperature > 0, "no logits, or no temperature");
  Tensor out = at::empty(logits.sizes(), logits.options().dtype(at::kFloat));
  // A thread may flush subnormal numbers or not, so whatever comes near them is nothing: 2^-100 of the highest.
  const Float scale(1 / static_cast<float>(temperature)), least(0x1p-100f), nothing(0);
  at::parallel_for(0, N, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const bf16* row = rows.const_data_ptr<bf16>() + n * V;
      float* p = out.mutable_data_ptr<float>() + n * V;
      Float highest(-INFINITY), total(0);
      for (int64_t i = 0, count; i < V; i += count) {
        count = std::min(kLanes, V - i);
        const Float x = load(row + i, count) * scale;
        highest = at::vec::maximum(highest, Float::set(highest, x, count));
        x.store(p + i, count);
      }
      const Float most(highest.reduce_max());
      for (int64_t i = 0, count; i < V; i += count) {
        count = std::min(kLanes, V - i);
        Float weight = (Float::loadu(p + i, count) - most).exp_u20();
        weight = Float::blendv(nothing, weight, weight >= least);
        total = total + Float::set(nothing, weight, count);
        weight.store(p + i, count);
      }
      const Float share(1 / total.reduce_add());
      for (int64_t i = 0, count; i < V; i += count) {
        count = std::min(kLanes, V - i);
        (Float::loadu(p + i, count) * share).store(p + i, count);
      }
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY(dspark, library) {
  library.def("columns() -> int", [] { return kColumns; });
  library.def("linear(Tensor x, Tensor weight, int O) -> Tensor", linear);
  library.def("add_rms_norm(Tensor x, Tensor? delta, Tensor weight, float eps) -> (Tensor, Tensor)", add_rms_norm);
  library.def("silu_mul(Tensor gate_up) -> Tensor", silu_mul);
  library.def("argmax(Tensor logits) -> Tensor", argmax);
  library.def("probabilities(Tensor logits, float temperature) -> Tensor", probabilities);
  library.def(
      "attend(Tensor qkv, Tensor? q_norm, Tensor? k_norm, float eps, Tensor cos, Tensor sin, Tensor positions, "
      "Tensor requests, Tensor visible, Tensor(a!) cache_k, Tensor(b!) cache_v) -> Tensor",
      attend);
}
