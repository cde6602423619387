#include "trainer/tensor/cpu_gemm.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "dnnl.hpp"
#include "trainer/tensor/cpu_kernels.h"

namespace shardd::tensor::cpu {
namespace {

using dnnl::memory;

// What a bf16 primitive is made for.
struct Key {
  int64_t m, n, k;
  bool transpose_a, transpose_b, accumulate, bias, bf16_out;
  auto Tie() const {
    return std::tie(m, n, k, transpose_a, transpose_b, accumulate, bias, bf16_out);
  }
  bool operator<(const Key& other) const { return Tie() < other.Tie(); }
};

// A primitive with its memory objects, whose handles are set before each run.
struct Matmul {
  dnnl::matmul primitive;
  memory a, b, c, bias, scratchpad;
};

memory::desc MatrixDesc(int64_t rows, int64_t cols, memory::data_type type, bool transposed) {
  return memory::desc({rows, cols}, type,
                      transposed ? memory::dims{1, rows} : memory::dims{cols, 1});
}

// C = alpha AB (+ C) over an empty sum or an empty result: oneDNN refuses those.
bool HandleEmpty(const GemmArgs& args) {
  if (args.m == 0 || args.n == 0) return true;
  if (args.k != 0) return false;
  if (args.accumulate) return true;
  const std::vector<float> zeros(static_cast<size_t>(args.n), 0.0f);
  const float* row = args.bias != nullptr ? args.bias : zeros.data();
  char* out = static_cast<char*>(args.c.data);
  for (int64_t i = 0; i < args.m; ++i) {
    Cast({row, DType::kFloat32}, args.n,
         {out + i * args.n * DTypeSize(args.c.dtype), args.c.dtype});
  }
  return true;
}

void RunFp32(const GemmArgs& args, const float* a, const float* b, float* c) {
  float beta = args.accumulate ? 1.0f : 0.0f;
  if (args.bias != nullptr) {
    for (int64_t i = 0; i < args.m; ++i) {
      std::memcpy(c + i * args.n, args.bias, args.n * sizeof(float));
    }
    beta = 1.0f;
  }
  RunStrided({.m = args.m,
              .n = args.n,
              .k = args.k,
              .a = a,
              .lda = args.transpose_a ? args.m : args.k,
              .transpose_a = args.transpose_a,
              .b = b,
              .ldb = args.transpose_b ? args.k : args.n,
              .transpose_b = args.transpose_b,
              .c = c,
              .ldc = args.n,
              .beta = beta});
}

}  // namespace

void RunStrided(const StridedGemm& args) {
  const dnnl_status_t status =
      dnnl_sgemm(args.transpose_a ? 'T' : 'N', args.transpose_b ? 'T' : 'N', args.m, args.n, args.k,
                 args.alpha, args.a, args.lda, args.b, args.ldb, args.beta, args.c, args.ldc);
  if (status != dnnl_success) {
    // Only arguments that ops.h has already checked, or memory, can fail here.
    std::fprintf(stderr, "fatal: oneDNN sgemm %ldx%ldx%ld failed with status %d\n",
                 static_cast<long>(args.m), static_cast<long>(args.n), static_cast<long>(args.k),
                 static_cast<int>(status));
    std::abort();
  }
}

struct GemmRunner::Impl {
  Impl() : engine(dnnl::engine::kind::cpu, 0), stream(engine) {
    native_bf16 =
        static_cast<bool>(MakePrimitiveDesc({16, 16, 16, false, false, false, false, false}));
  }

  dnnl::matmul::primitive_desc MakePrimitiveDesc(const Key& key) const {
    const auto bf16 = memory::data_type::bf16;
    const auto f32 = memory::data_type::f32;
    const memory::desc a = MatrixDesc(key.m, key.k, bf16, key.transpose_a);
    const memory::desc b = MatrixDesc(key.k, key.n, bf16, key.transpose_b);
    const memory::desc c = MatrixDesc(key.m, key.n, key.bf16_out ? bf16 : f32, false);
    dnnl::primitive_attr attr;
    attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (key.accumulate) {
      dnnl::post_ops sum;
      sum.append_sum(1.0f);
      attr.set_post_ops(sum);
    }
    try {
      const auto desc = key.bias ? dnnl::matmul::desc(a, b, MatrixDesc(1, key.n, f32, false), c)
                                 : dnnl::matmul::desc(a, b, c);
      return dnnl::matmul::primitive_desc(desc, attr, engine, /*allow_empty=*/true);
    } catch (const dnnl::error&) {
      return {};
    }
  }

  // Null when oneDNN has no bf16 product for this CPU.
  Matmul* Find(const Key& key) {
    const auto it = primitives.find(key);
    if (it != primitives.end()) return it->second.get();
    std::unique_ptr<Matmul> made;
    if (native_bf16) {
      if (const auto pd = MakePrimitiveDesc(key)) {
        made = std::make_unique<Matmul>();
        made->primitive = dnnl::matmul(pd);
        made->a = memory(pd.src_desc(), engine, nullptr);
        made->b = memory(pd.weights_desc(), engine, nullptr);
        made->c = memory(pd.dst_desc(), engine, nullptr);
        if (key.bias) made->bias = memory(pd.bias_desc(), engine, nullptr);
        made->scratchpad = memory(pd.scratchpad_desc(), engine, nullptr);
        scratchpad_bytes = std::max(scratchpad_bytes, pd.scratchpad_desc().get_size());
      }
    }
    return primitives.emplace(key, std::move(made)).first->second.get();
  }

  void RunBf16(const GemmArgs& args) {
    Matmul* matmul =
        Find({args.m, args.n, args.k, args.transpose_a, args.transpose_b, args.accumulate,
              args.bias != nullptr, args.c.dtype == DType::kBFloat16});
    if (matmul == nullptr) return RunThroughFp32(args);
    // One scratchpad, as large as the largest primitive's, aligned to 64 bytes.
    if (scratchpad.size() < scratchpad_bytes + 64) scratchpad.resize(scratchpad_bytes + 64);
    const uintptr_t aligned = (reinterpret_cast<uintptr_t>(scratchpad.data()) + 63) / 64 * 64;
    matmul->a.set_data_handle(const_cast<void*>(args.a.data));
    matmul->b.set_data_handle(const_cast<void*>(args.b.data));
    matmul->c.set_data_handle(args.c.data);
    matmul->scratchpad.set_data_handle(reinterpret_cast<void*>(aligned));
    std::unordered_map<int, memory> arguments = {{DNNL_ARG_SRC, matmul->a},
                                                 {DNNL_ARG_WEIGHTS, matmul->b},
                                                 {DNNL_ARG_DST, matmul->c},
                                                 {DNNL_ARG_SCRATCHPAD, matmul->scratchpad}};
    if (args.bias != nullptr) {
      matmul->bias.set_data_handle(const_cast<float*>(args.bias));
      arguments.emplace(DNNL_ARG_BIAS, matmul->bias);
    }
    matmul->primitive.execute(stream, arguments);
    stream.wait();
  }

  // fp32 products of operands of any dtype, through fp32 copies where needed.
  void RunThroughFp32(const GemmArgs& args) {
    const float* a = Fp32(args.a, args.m * args.k, &copy_a);
    const float* b = Fp32(args.b, args.k * args.n, &copy_b);
    if (args.c.dtype == DType::kFloat32) {
      return RunFp32(args, a, b, static_cast<float*>(args.c.data));
    }
    const size_t count = static_cast<size_t>(args.m) * args.n;
    copy_c.resize(std::max(copy_c.size(), count));
    if (args.accumulate) Cast(args.c, count, {copy_c.data(), DType::kFloat32});
    RunFp32(args, a, b, copy_c.data());
    Cast({copy_c.data(), DType::kFloat32}, count, args.c);
  }

  static const float* Fp32(ConstBuffer in, int64_t count, std::vector<float>* copy) {
    if (in.dtype == DType::kFloat32) return static_cast<const float*>(in.data);
    copy->resize(std::max(copy->size(), static_cast<size_t>(count)));
    Cast(in, count, {copy->data(), DType::kFloat32});
    return copy->data();
  }

  dnnl::engine engine;
  dnnl::stream stream;
  bool native_bf16 = false;
  std::map<Key, std::unique_ptr<Matmul>> primitives;
  std::vector<char> scratchpad;
  size_t scratchpad_bytes = 0;
  std::vector<float> copy_a, copy_b, copy_c;
};

GemmRunner::GemmRunner() : impl_(std::make_unique<Impl>()) {}
GemmRunner::~GemmRunner() = default;

bool GemmRunner::native_bf16() const { return impl_->native_bf16; }

void GemmRunner::Run(const GemmArgs& args) {
  if (HandleEmpty(args)) return;
  if (args.a.dtype == DType::kBFloat16 && args.b.dtype == DType::kBFloat16) {
    return impl_->RunBf16(args);
  }
  impl_->RunThroughFp32(args);
}

}  // namespace shardd::tensor::cpu
