// The few-row operations of decoding on a CPU with AVX512-BF16, which dspark/kernels/cpu.py compiles.
//
// Every row is computed alike however many rows stand beside it: one order of sums, one rounding. So verifying a token
// gives bit for bit what decoding it alone gives. Sums are float32; what leaves an operation is rounded once.
// Axes: N rows (tokens of any requests), K inputs, O outputs, h query heads, g key heads, d head size, L cache places.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/vec.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace {

using at::Tensor;
using bf16 = at::BFloat16;
using Float = at::vec::Vectorized<float>;
constexpr int64_t kLanes = 16;
constexpr int64_t kColumns = 32;  // outputs of one block of weights: two registers
constexpr int64_t kRows = 12;     // rows that share one reading of a block: 24 accumulators of 32 registers

__m512 load(const bf16* at) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))), 16));
}

void store(bf16* at, __m512 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), (__m256i)_mm512_cvtneps_pbh(x));
}

// ---- x [N, K] times a block of weights [K/2, 32, 2] -> [N, 32]

template <int N>
void multiply(const bf16* x, const bf16* w, int64_t K, float* out) {
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

using Multiply = void (*)(const bf16*, const bf16*, int64_t, float*);
constexpr Multiply kMultiply[kRows] = {multiply<1>, multiply<2>, multiply<3>,  multiply<4>,  multiply<5>,  multiply<6>,
                                       multiply<7>, multiply<8>, multiply<9>, multiply<10>, multiply<11>, multiply<12>};

// x [..., K], weight [blocks, K/2, 32, 2] -> [..., O]
Tensor linear(const Tensor& x, const Tensor& weight, int64_t O) {
  const Tensor rows = x.contiguous();
  const int64_t K = 2 * weight.size(1), N = rows.numel() / K;
  TORCH_CHECK(x.size(-1) == K, "x has ", x.size(-1), " columns, the weight takes ", K);
  auto shape = x.sizes().vec();
  shape.back() = O;
  Tensor out = at::empty(shape, x.options());
  const bf16 *from = rows.const_data_ptr<bf16>(), *w = weight.const_data_ptr<bf16>();
  bf16* to = out.mutable_data_ptr<bf16>();
  at::parallel_for(0, weight.size(0), 1, [&](int64_t begin, int64_t end) {
    float tile[kRows * kColumns];
    for (int64_t block = begin; block < end; ++block) {
      const int64_t width = std::min(kColumns, O - block * kColumns);
      for (int64_t n = 0; n < N; n += kRows) {
        const int64_t count = std::min(kRows, N - n);
        kMultiply[count - 1](from + n * K, w + block * K * kColumns, K, tile);
        for (int64_t i = 0; i < count; ++i)
          at::vec::convert(tile + i * kColumns, to + (n + i) * O + block * kColumns, width);
      }
    }
  });
  return out;
}

// ---- what lies between the products

// x [H] (+ delta [H], left in total) -> its RMS norm
void norm_row(const bf16* x, const bf16* delta, bf16* total, const bf16* weight, int64_t H, double eps, bf16* out) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < H; i += kLanes) {
    __m512 part = load(x + i);
    if (delta) {
      store(total + i, _mm512_add_ps(part, load(delta + i)));
      part = load(total + i);  // what later layers add to is the rounded sum
    }
    squares = _mm512_fmadd_ps(part, part, squares);
  }
  const __m512 scale = _mm512_set1_ps(1 / std::sqrt(_mm512_reduce_add_ps(squares) / H + static_cast<float>(eps)));
  const bf16* from = delta ? total : x;
  for (int64_t i = 0; i < H; i += kLanes)
    store(out + i, _mm512_mul_ps(_mm512_mul_ps(load(from + i), scale), load(weight + i)));
}

// x [..., H], delta [..., H], weight [H] -> x + delta, its RMS norm; without delta x itself
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const std::optional<Tensor>& delta, const Tensor& weight,
                                        double eps) {
  const Tensor rows = x.contiguous(), added = delta ? delta->contiguous() : rows;
  const int64_t H = weight.numel(), N = rows.numel() / H;
  TORCH_CHECK(H % kLanes == 0 && x.size(-1) == H, "rows of ", x.size(-1), ", a weight of ", H, ": a multiple of 16 fits");
  TORCH_CHECK(added.sizes() == x.sizes(), "x and what is added to it have different shapes");
  Tensor total = delta ? at::empty_like(rows) : rows, out = at::empty_like(rows);
  const bf16 *from = rows.const_data_ptr<bf16>(), *add = delta ? added.const_data_ptr<bf16>() : nullptr;
  bf16 *sum = delta ? total.mutable_data_ptr<bf16>() : nullptr, *to = out.mutable_data_ptr<bf16>();
  for (int64_t i = 0; i < N * H; i += H)
    norm_row(from + i, add ? add + i : nullptr, sum ? sum + i : nullptr, weight.const_data_ptr<bf16>(), H, eps, to + i);
  return {total, out};
}

// gate and up side by side [..., 2I] -> silu(gate) * up [..., I]
Tensor silu_mul(const Tensor& gate_up) {
  const int64_t I = gate_up.size(-1) / 2, N = gate_up.numel() / (2 * I);
  TORCH_CHECK(I % kLanes == 0 && gate_up.is_contiguous(), "gates of ", I, ": a multiple of 16, contiguous, is needed");
  auto shape = gate_up.sizes().vec();
  shape.back() = I;
  Tensor out = at::empty(shape, gate_up.options());
  const bf16* from = gate_up.const_data_ptr<bf16>();
  bf16* to = out.mutable_data_ptr<bf16>();
  at::parallel_for(0, N * I / kLanes, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const int64_t n = part * kLanes / I, i = part * kLanes % I;
      const __m512 gate = load(from + 2 * n * I + i), up = load(from + (2 * n + 1) * I + i);
      const __m512 falls = Float(_mm512_sub_ps(_mm512_setzero_ps(), gate)).exp_u20();
      store(to + n * I + i, _mm512_mul_ps(_mm512_div_ps(gate, _mm512_add_ps(_mm512_set1_ps(1), falls)), up));
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
    for (int64_t i = 0; i < d / 2; i += kLanes) {
      const __m512 a = load(x + i), b = load(x + d / 2 + i);
      const __m512 first = _mm512_fmsub_ps(a, _mm512_loadu_ps(cos + i), _mm512_mul_ps(b, _mm512_loadu_ps(sin + i)));
      const __m512 second = _mm512_fmadd_ps(b, _mm512_loadu_ps(cos + d / 2 + i), _mm512_mul_ps(a, _mm512_loadu_ps(sin + d / 2 + i)));
      store(out + i, first);
      store(out + d / 2 + i, second);
    }
  }
};

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

// q [d] over keys and values [L, d], their rows `step` apart -> out [d]; scores: room for L, rounded up to 16
template <int Parts>  // d / 32
void attend_row(const bf16* q, const bf16* keys, const bf16* values, int64_t step, int64_t L, float* scores, bf16* out) {
  constexpr int64_t d = 32 * Parts;
  __m512bh query[Parts];
  for (int p = 0; p < Parts; ++p) query[p] = (__m512bh)_mm512_loadu_si512(q + 32 * p);
  const __m512 scale = _mm512_set1_ps(1 / std::sqrt(static_cast<float>(d))), never = _mm512_set1_ps(-INFINITY);
  __m512 highest = never;
  for (int64_t t = 0; t < L; t += kLanes) {
    __m512 products[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      const bf16* key = keys + std::min(t + i, L - 1) * step;
      products[i] = _mm512_setzero_ps();
#pragma GCC unroll 4
      for (int p = 0; p < Parts; ++p)
        products[i] = _mm512_dpbf16_ps(products[i], query[p], (__m512bh)_mm512_loadu_si512(key + 32 * p));
    }
    const __mmask16 real = L - t < kLanes ? (1u << (L - t)) - 1 : 0xffff;
    const __m512 score = _mm512_mask_mov_ps(never, real, _mm512_mul_ps(sums(products), scale));
    highest = _mm512_max_ps(highest, score);
    _mm512_storeu_ps(scores + t, score);
  }
  const __m512 most = _mm512_set1_ps(_mm512_reduce_max_ps(highest));
  __m512 weights = _mm512_setzero_ps();
  for (int64_t t = 0; t < L; t += kLanes) {
    const __m512 weight = Float(_mm512_sub_ps(_mm512_loadu_ps(scores + t), most)).exp_u20();  // of -inf it is 0
    weights = _mm512_add_ps(weights, weight);
    _mm512_storeu_ps(scores + t, weight);
  }
  __m512 sum[2 * Parts];
#pragma GCC unroll 8
  for (int p = 0; p < 2 * Parts; ++p) sum[p] = _mm512_setzero_ps();
  for (int64_t t = 0; t < L; ++t)
#pragma GCC unroll 8
    for (int p = 0; p < 2 * Parts; ++p)
      sum[p] = _mm512_fmadd_ps(_mm512_set1_ps(scores[t]), load(values + t * step + kLanes * p), sum[p]);
  const __m512 share = _mm512_set1_ps(1 / _mm512_reduce_add_ps(weights));
#pragma GCC unroll 8
  for (int p = 0; p < 2 * Parts; ++p) store(out + kLanes * p, _mm512_mul_ps(sum[p], share));
}

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
  const auto attend_one = d == 64 ? attend_row<2> : attend_row<4>;
  Tensor turned = at::empty({N, h * d}, qkv.options()), out = at::empty({N, h * d}, qkv.options());
  if (!N) return out;
  const bf16* from = qkv.const_data_ptr<bf16>();
  bf16 *queries = turned.mutable_data_ptr<bf16>(), *to = out.mutable_data_ptr<bf16>();
  bf16 *ks = cache_k.mutable_data_ptr<bf16>(), *vs = cache_v.mutable_data_ptr<bf16>();
  const Tensor where[] = {positions.contiguous(), requests.contiguous(), visible.contiguous()};
  const int64_t *at = where[0].const_data_ptr<int64_t>(), *request = where[1].const_data_ptr<int64_t>();
  const int64_t* sees = where[2].const_data_ptr<int64_t>();
  const int64_t most = *std::max_element(sees, sees + N), last = *std::max_element(at, at + N);
  TORCH_CHECK(*std::max_element(request, request + N) < cache_k.size(0), "a request has no row in the cache");
  TORCH_CHECK(most <= cache_k.size(2) && last < cache_k.size(2) && last < cos.size(0), "the cache is too short");
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
  at::parallel_for(0, N * h, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(most + kLanes);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t n = i / h, head = i % h / (h / g);
      attend_one(queries + i * d, ks + place(cache_k, request[n], head, 0), vs + place(cache_v, request[n], head, 0),
                 cache_k.stride(2), sees[n], scores.data(), to + i * d);
    }
  });
  return out;
}

// ---- the best token: logits [..., V] -> the first of the highest [...]

Tensor argmax(const Tensor& logits) {
  const Tensor rows = logits.contiguous();
  const int64_t V = rows.size(-1), N = rows.numel() / std::max<int64_t>(V, 1);
  TORCH_CHECK(V > 0, "no logits");
  Tensor out = at::empty(logits.sizes().slice(0, logits.dim() - 1), logits.options().dtype(at::kLong));
  int64_t* to = out.mutable_data_ptr<int64_t>();
  at::parallel_for(0, N, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const bf16* row = rows.const_data_ptr<bf16>() + n * V;
      __m512 highest = _mm512_set1_ps(-INFINITY);
      const int64_t whole = V - V % kLanes;
      for (int64_t i = 0; i < whole; i += kLanes) highest = _mm512_max_ps(highest, load(row + i));
      float most = _mm512_reduce_max_ps(highest);
      for (int64_t i = whole; i < V; ++i) most = std::max(most, static_cast<float>(row[i]));
      const bf16* found = std::find(row, row + V, bf16(most));
      to[n] = found == row + V ? 0 : found - row;  // nothing equals NaN
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
  const __m512 scale = _mm512_set1_ps(1 / static_cast<float>(temperature));
  at::parallel_for(0, N, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const bf16* row = rows.const_data_ptr<bf16>() + n * V;
      float* p = out.mutable_data_ptr<float>() + n * V;
      __m512 highest = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
      for (int64_t i = 0; i < V; i += kLanes) {
        const __mmask16 real = V - i < kLanes ? (1u << (V - i)) - 1 : 0xffff;
        const __m256i part = _mm256_maskz_loadu_epi16(real, row + i);
        const __m512 x = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(part), 16)), scale);
        highest = _mm512_mask_max_ps(highest, real, highest, x);
        _mm512_mask_storeu_ps(p + i, real, x);
      }
      const __m512 most = _mm512_set1_ps(_mm512_reduce_max_ps(highest));
      for (int64_t i = 0; i < V; i += kLanes) {
        const __mmask16 real = V - i < kLanes ? (1u << (V - i)) - 1 : 0xffff;
        const __m512 weight = Float(_mm512_sub_ps(_mm512_maskz_loadu_ps(real, p + i), most)).exp_u20();
        total = _mm512_mask_add_ps(total, real, total, weight);
        _mm512_mask_storeu_ps(p + i, real, weight);
      }
      const __m512 share = _mm512_set1_ps(1 / _mm512_reduce_add_ps(total));
      for (int64_t i = 0; i < V; i += kLanes) {
        const __mmask16 real = V - i < kLanes ? (1u << (V - i)) - 1 : 0xffff;
        _mm512_mask_storeu_ps(p + i, real, _mm512_mul_ps(_mm512_maskz_loadu_ps(real, p + i), share));
      }
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY(dspark, library) {
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
