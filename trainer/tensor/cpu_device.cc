#include "trainer/tensor/cpu_device.h"

#include <omp.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "trainer/tensor/cpu_kernels.h"

namespace shardd::tensor {
namespace {

// Rows that one partial column sum covers. Fixed, so that sums over rows do not
// depend on the number of threads.
constexpr int64_t kRowsPerPart = 64;
// Elements that one piece of an element-wise kernel covers.
constexpr int64_t kElementsPerPiece = 16384;

// Steps a buffer by elements.
ConstBuffer At(ConstBuffer b, int64_t element) {
  return {static_cast<const char*>(b.data) + element * DTypeSize(b.dtype), b.dtype};
}
Buffer At(Buffer b, int64_t element) {
  return {static_cast<char*>(b.data) + element * DTypeSize(b.dtype), b.dtype};
}

size_t RoundedBytes(size_t bytes) {
  // Powers of two and the three steps between: few distinct sizes, little waste.
  size_t size = 256;
  while (size < bytes) size *= 2;
  const size_t step = size / 8;
  while (size > 256 && size - step >= bytes) size -= step;
  return (size + 63) / 64 * 64;
}

}  // namespace

CpuDevice::CpuDevice(const Options& options) : threads_(std::max(1, options.threads)) {
  // oneDNN takes its team from the calling thread's OpenMP settings; a dynamic
  // team would change the order of sums.
  omp_set_dynamic(0);
  omp_set_num_threads(threads_);
}

CpuDevice::~CpuDevice() {
  for (auto& [bytes, blocks] : free_) {
    for (void* block : blocks) std::free(block);
  }
}

void* CpuDevice::Allocate(size_t bytes) {
  if (bytes == 0) return nullptr;
  const size_t rounded = RoundedBytes(bytes);
  std::vector<void*>& blocks = free_[rounded];
  if (!blocks.empty()) {
    void* block = blocks.back();
    blocks.pop_back();
    return block;
  }
  void* block = std::aligned_alloc(64, rounded);
  if (block == nullptr) {
    std::fprintf(stderr, "fatal: cannot allocate %zu bytes for a tensor; use a smaller batch\n",
                 rounded);
    std::abort();
  }
  reserved_bytes_ += rounded;
  return block;
}

void CpuDevice::Free(void* data, size_t bytes) {
  if (data != nullptr) free_[RoundedBytes(bytes)].push_back(data);
}

void CpuDevice::FromHost(const void* host, size_t bytes, void* data) {
  if (bytes > 0) std::memcpy(data, host, bytes);
}
void CpuDevice::ToHost(const void* data, size_t bytes, void* host) {
  if (bytes > 0) std::memcpy(host, data, bytes);
}

void CpuDevice::ForPieces(int64_t count, int64_t grain,
                          const std::function<void(int64_t, int64_t)>& body) const {
  const int64_t pieces = (count + grain - 1) / grain;
  const auto piece = [&](int64_t p) { body(p * grain, std::min(count, (p + 1) * grain)); };
  if (threads_ == 1 || pieces <= 1) {
    for (int64_t p = 0; p < pieces; ++p) piece(p);
    return;
  }
#pragma omp parallel for schedule(static) num_threads(threads_)
  for (int64_t p = 0; p < pieces; ++p) piece(p);
}

void CpuDevice::FoldParts(const std::vector<float>& parts, int64_t cols, bool accumulate,
                          float* out) {
  if (!accumulate) std::fill_n(out, cols, 0.0f);
  if (cols == 0) return;
  cpu::AddRowsInto({parts.data(), DType::kFloat32}, parts.size() / cols, cols, out);
}

void CpuDevice::Gemm(const GemmArgs& args) { gemm_.Run(args); }

void CpuDevice::Fill(float value, int64_t count, float* out) { std::fill_n(out, count, value); }

void CpuDevice::Cast(ConstBuffer in, int64_t count, Buffer out) {
  ForPieces(count, kElementsPerPiece, [&](int64_t begin, int64_t end) {
    cpu::Cast(At(in, begin), end - begin, At(out, begin));
  });
}

void CpuDevice::Add(ConstBuffer a, ConstBuffer b, int64_t count, Buffer out) {
  ForPieces(count, kElementsPerPiece, [&](int64_t begin, int64_t end) {
    cpu::Add(At(a, begin), At(b, begin), end - begin, At(out, begin));
  });
}

void CpuDevice::ColumnSum(ConstBuffer x, int64_t rows, int64_t cols, bool accumulate, float* out) {
  std::vector<float> parts((rows + kRowsPerPart - 1) / kRowsPerPart * cols, 0.0f);
  ForPieces(rows, kRowsPerPart, [&](int64_t begin, int64_t end) {
    cpu::AddRowsInto(At(x, begin * cols), end - begin, cols,
                     parts.data() + begin / kRowsPerPart * cols);
  });
  FoldParts(parts, cols, accumulate, out);
}

void CpuDevice::LayerNorm(const LayerNormArgs& args, Buffer y) {
  ForPieces(args.rows, kRowsPerPart, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      cpu::LayerNormRow(At(args.x, r * args.cols), args.gain, args.bias, args.eps, args.cols,
                        args.mean + r, args.rstd + r, At(y, r * args.cols));
    }
  });
}

void CpuDevice::LayerNormBackward(const LayerNormArgs& args, ConstBuffer dy, bool accumulate_dx,
                                  Buffer dx, bool accumulate_gain, float* d_gain,
                                  bool accumulate_bias, float* d_bias) {
  const int64_t cols = args.cols;
  const int64_t parts = (args.rows + kRowsPerPart - 1) / kRowsPerPart;
  std::vector<float> gain_parts(parts * cols, 0.0f), bias_parts(parts * cols, 0.0f);
  ForPieces(args.rows, kRowsPerPart, [&](int64_t begin, int64_t end) {
    const int64_t part = begin / kRowsPerPart * cols;
    for (int64_t r = begin; r < end; ++r) {
      cpu::LayerNormBackwardRow(At(args.x, r * cols), args.gain, args.mean[r], args.rstd[r],
                                At(dy, r * cols), cols, accumulate_dx, At(dx, r * cols),
                                gain_parts.data() + part, bias_parts.data() + part);
    }
  });
  FoldParts(gain_parts, cols, accumulate_gain, d_gain);
  FoldParts(bias_parts, cols, accumulate_bias, d_bias);
}

void CpuDevice::Gelu(ConstBuffer x, int64_t count, Buffer y) {
  ForPieces(count, kElementsPerPiece, [&](int64_t begin, int64_t end) {
    cpu::Gelu(At(x, begin), end - begin, At(y, begin));
  });
}

void CpuDevice::GeluBackward(ConstBuffer x, ConstBuffer dy, int64_t count, Buffer dx) {
  ForPieces(count, kElementsPerPiece, [&](int64_t begin, int64_t end) {
    cpu::GeluBackward(At(x, begin), At(dy, begin), end - begin, At(dx, begin));
  });
}

void CpuDevice::GatherRows(ConstBuffer table, const int32_t* ids, int64_t rows, int64_t cols,
                           bool accumulate, float* out) {
  ForPieces(rows, kRowsPerPart, [&](int64_t begin, int64_t end) {
    std::vector<float> row(accumulate ? cols : 0);
    for (int64_t r = begin; r < end; ++r) {
      const ConstBuffer source = At(table, ids[r] * cols);
      float* target = out + r * cols;
      if (!accumulate) {
        cpu::Cast(source, cols, {target, DType::kFloat32});
        continue;
      }
      cpu::Cast(source, cols, {row.data(), DType::kFloat32});
      cpu::AddRowsInto({row.data(), DType::kFloat32}, 1, cols, target);
    }
  });
}

void CpuDevice::ScatterAddRows(ConstBuffer dy, const int32_t* ids, int64_t rows, int64_t cols,
                               int64_t vocabulary, bool accumulate, float* grad) {
  // A stable counting sort by id, so that each table row is summed by one thread
  // in ascending order of its occurrences.
  std::vector<int64_t> start(vocabulary + 1, 0);
  for (int64_t r = 0; r < rows; ++r) ++start[ids[r] + 1];
  for (int64_t v = 0; v < vocabulary; ++v) start[v + 1] += start[v];
  std::vector<int64_t> order(rows), next(start.begin(), start.end() - 1);
  for (int64_t r = 0; r < rows; ++r) order[next[ids[r]]++] = r;
  ForPieces(vocabulary, kRowsPerPart, [&](int64_t begin, int64_t end) {
    for (int64_t v = begin; v < end; ++v) {
      float* sum = grad + v * cols;
      if (!accumulate) std::fill_n(sum, cols, 0.0f);
      for (int64_t i = start[v]; i < start[v + 1]; ++i) {
        cpu::AddRowsInto(At(dy, order[i] * cols), 1, cols, sum);
      }
    }
  });
}

void CpuDevice::CrossEntropy(ConstBuffer logits, const int32_t* labels, int64_t rows,
                             int64_t classes, int64_t targets, float* lse, double* loss) {
  std::vector<float> row_loss(rows, 0.0f);
  ForPieces(rows, kRowsPerPart, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const ConstBuffer row = At(logits, r * classes);
      lse[r] = cpu::LogSumExpRow(row, classes);
      if (labels[r] == kIgnoreLabel) continue;
      float target = 0;
      cpu::Cast(At(row, labels[r]), 1, {&target, DType::kFloat32});
      row_loss[r] = lse[r] - target;
    }
  });
  double sum = 0;
  for (float value : row_loss) sum += value;
  *loss = targets > 0 ? sum / static_cast<double>(targets) : 0.0;
}

void CpuDevice::CrossEntropyBackward(ConstBuffer logits, const int32_t* labels, int64_t rows,
                                     int64_t classes, int64_t targets, const float* lse,
                                     const float* d_loss, Buffer d_logits) {
  const float scale = targets > 0 ? *d_loss / static_cast<float>(targets) : 0.0f;
  ForPieces(rows, kRowsPerPart, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const Buffer out = At(d_logits, r * classes);
      if (labels[r] == kIgnoreLabel) {
        std::memset(out.data, 0, classes * DTypeSize(out.dtype));
        continue;
      }
      cpu::CrossEntropyBackwardRow(At(logits, r * classes), lse[r], scale, classes, out);
      const Buffer target = At(out, labels[r]);
      float value = 0;
      cpu::CrossEntropyBackwardRow(At(logits, r * classes + labels[r]), lse[r], scale, 1,
                                   {&value, DType::kFloat32});
      value -= scale;
      cpu::Cast({&value, DType::kFloat32}, 1, target);
    }
  });
}

}  // namespace shardd::tensor
