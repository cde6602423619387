// Causal attention on the CPU. Scores are never kept: the backward pass computes
// them again, block of queries by block of queries, from the log-sum-exp.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "trainer/tensor/cpu_device.h"
#include "trainer/tensor/cpu_kernels.h"

namespace shardd::tensor {
namespace {

// Queries that are handled at once: their scores [64,length] stay in cache, and
// keys beyond the last of them are not touched.
constexpr int64_t kQueryBlock = 64;

// fp32 copies of one head, and its scores. One for each thread.
struct HeadWorkspace {
  explicit HeadWorkspace(const AttentionArgs& args)
      : q(args.length * args.head_dim),
        k(q.size()),
        v(q.size()),
        o(q.size()),
        d_o(q.size()),
        d_q(q.size()),
        d_k(q.size()),
        d_v(q.size()),
        p(kQueryBlock * args.length),
        d_p(p.size()) {}
  std::vector<float> q, k, v, o, d_o, d_q, d_k, d_v;
  std::vector<float> p, d_p;  // [kQueryBlock, keys]
};

// Where the rows of one head lie in a [batch,length,row_elements] tensor.
struct HeadView {
  int64_t first = 0;  // element of position 0
  int64_t row = 0;    // elements between positions
};

void LoadHead(ConstBuffer in, HeadView view, const AttentionArgs& args, float scale, float* out) {
  const size_t size = DTypeSize(in.dtype);
  for (int64_t t = 0; t < args.length; ++t) {
    const char* source = static_cast<const char*>(in.data) + (view.first + t * view.row) * size;
    cpu::CastScaled({source, in.dtype}, scale, args.head_dim, out + t * args.head_dim);
  }
}

void StoreHead(const float* in, HeadView view, const AttentionArgs& args, Buffer out) {
  const size_t size = DTypeSize(out.dtype);
  for (int64_t t = 0; t < args.length; ++t) {
    char* target = static_cast<char*>(out.data) + (view.first + t * view.row) * size;
    cpu::Cast({in + t * args.head_dim, DType::kFloat32}, args.head_dim, {target, out.dtype});
  }
}

// Head h of sequence b: its queries (part 0), keys (1) or values (2) in qkv.
HeadView QkvView(const AttentionArgs& args, int64_t b, int64_t h, int64_t part) {
  const int64_t width = args.heads * args.head_dim;
  return {.first = b * args.length * 3 * width + part * width + h * args.head_dim,
          .row = 3 * width};
}
HeadView OutView(const AttentionArgs& args, int64_t b, int64_t h) {
  const int64_t width = args.heads * args.head_dim;
  return {.first = b * args.length * width + h * args.head_dim, .row = width};
}

void LoadQkv(const AttentionArgs& args, int64_t b, int64_t h, HeadWorkspace* w) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(args.head_dim));
  LoadHead(args.qkv, QkvView(args, b, h, 0), args, scale, w->q.data());
  LoadHead(args.qkv, QkvView(args, b, h, 1), args, 1.0f, w->k.data());
  LoadHead(args.qkv, QkvView(args, b, h, 2), args, 1.0f, w->v.data());
}

// scores[rows,keys] = x[first..first+rows) · y[0..keys)ᵀ
void Scores(const float* x, const float* y, int64_t first, int64_t rows, int64_t keys,
            int64_t head_dim, float* scores) {
  cpu::RunStrided({.m = rows,
                   .n = keys,
                   .k = head_dim,
                   .a = x + first * head_dim,
                   .lda = head_dim,
                   .b = y,
                   .ldb = head_dim,
                   .transpose_b = true,
                   .c = scores,
                   .ldc = keys});
}

void ForwardHead(const AttentionArgs& args, int64_t b, int64_t h, Buffer out, HeadWorkspace* w) {
  const int64_t d = args.head_dim;
  LoadQkv(args, b, h, w);
  float* lse = args.lse + (b * args.heads + h) * args.length;
  for (int64_t first = 0; first < args.length; first += kQueryBlock) {
    const int64_t keys = std::min(args.length, first + kQueryBlock);
    const int64_t rows = keys - first;
    Scores(w->q.data(), w->k.data(), first, rows, keys, d, w->p.data());
    for (int64_t r = 0; r < rows; ++r) {
      lse[first + r] = cpu::SoftmaxRow(w->p.data() + r * keys, first + r + 1, keys);
    }
    cpu::RunStrided({.m = rows,
                     .n = d,
                     .k = keys,
                     .a = w->p.data(),
                     .lda = keys,
                     .b = w->v.data(),
                     .ldb = d,
                     .c = w->o.data() + first * d,
                     .ldc = d});
  }
  StoreHead(w->o.data(), OutView(args, b, h), args, out);
}

// One block of queries: adds to d_k and d_v, writes d_q.
void BackwardBlock(const AttentionArgs& args, const float* lse, int64_t first, HeadWorkspace* w) {
  const int64_t d = args.head_dim;
  const int64_t keys = std::min(args.length, first + kQueryBlock);
  const int64_t rows = keys - first;
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
  float* p = w->p.data();
  float* d_p = w->d_p.data();
  const float* d_o = w->d_o.data() + first * d;
  Scores(w->q.data(), w->k.data(), first, rows, keys, d, p);
  Scores(w->d_o.data(), w->v.data(), first, rows, keys, d, d_p);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t t = first + r;
    cpu::SoftmaxFromLseRow(p + r * keys, lse[t], t + 1, keys);
    const float dot = cpu::Dot(w->o.data() + t * d, w->d_o.data() + t * d, d);
    cpu::SoftmaxBackwardRow(p + r * keys, dot, keys, d_p + r * keys);
  }
  // d_v += pᵀ d_o;  d_k += d_pᵀ (scaled q);  d_q = scale d_p k.
  const cpu::StridedGemm over_queries = {.m = keys,
                                         .n = d,
                                         .k = rows,
                                         .lda = keys,
                                         .transpose_a = true,
                                         .ldb = d,
                                         .ldc = d,
                                         .beta = 1.0f};
  cpu::StridedGemm gemm = over_queries;
  gemm.a = p;
  gemm.b = d_o;
  gemm.c = w->d_v.data();
  cpu::RunStrided(gemm);
  gemm.a = d_p;
  gemm.b = w->q.data() + first * d;
  gemm.c = w->d_k.data();
  cpu::RunStrided(gemm);
  cpu::RunStrided({.m = rows,
                   .n = d,
                   .k = keys,
                   .a = d_p,
                   .lda = keys,
                   .b = w->k.data(),
                   .ldb = d,
                   .c = w->d_q.data() + first * d,
                   .ldc = d,
                   .alpha = scale});
}

void BackwardHead(const AttentionArgs& args, int64_t b, int64_t h, ConstBuffer out,
                  ConstBuffer d_out, Buffer d_qkv, HeadWorkspace* w) {
  LoadQkv(args, b, h, w);
  LoadHead(out, OutView(args, b, h), args, 1.0f, w->o.data());
  LoadHead(d_out, OutView(args, b, h), args, 1.0f, w->d_o.data());
  std::fill(w->d_k.begin(), w->d_k.end(), 0.0f);
  std::fill(w->d_v.begin(), w->d_v.end(), 0.0f);
  const float* lse = args.lse + (b * args.heads + h) * args.length;
  for (int64_t first = 0; first < args.length; first += kQueryBlock) {
    BackwardBlock(args, lse, first, w);
  }
  StoreHead(w->d_q.data(), QkvView(args, b, h, 0), args, d_qkv);
  StoreHead(w->d_k.data(), QkvView(args, b, h, 1), args, d_qkv);
  StoreHead(w->d_v.data(), QkvView(args, b, h, 2), args, d_qkv);
}

// Calls body(sequence, head, workspace) for every head, on `threads` threads. A
// head is one thread's work, so their number changes no bit.
template <class Body>
void ForHeads(const AttentionArgs& args, int threads, const Body& body) {
  const int64_t count = args.batch * args.heads;
  if (count == 0 || args.length == 0) return;
  if (threads == 1) {
    HeadWorkspace workspace(args);
    for (int64_t i = 0; i < count; ++i) body(i / args.heads, i % args.heads, &workspace);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    HeadWorkspace workspace(args);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; ++i) body(i / args.heads, i % args.heads, &workspace);
  }
}

}  // namespace

void CpuDevice::CausalAttention(const AttentionArgs& args, Buffer out) {
  ForHeads(args, threads_, [&](int64_t b, int64_t h, HeadWorkspace* workspace) {
    ForwardHead(args, b, h, out, workspace);
  });
}

void CpuDevice::CausalAttentionBackward(const AttentionArgs& args, ConstBuffer out,
                                        ConstBuffer d_out, Buffer d_qkv) {
  ForHeads(args, threads_, [&](int64_t b, int64_t h, HeadWorkspace* workspace) {
    BackwardHead(args, b, h, out, d_out, d_qkv, workspace);
  });
}

}  // namespace shardd::tensor
