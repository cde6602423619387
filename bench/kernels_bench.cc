// bench/run kernels: the update of every optimizer in every state format on chunk records as the
// daemon lays them out, with the undo log and bf16 weights, beside memcpy; for one thread and for
// all.
#include <sched.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "bench/measure.h"
#include "kernels/cast.h"
#include "kernels/isa.h"
#include "kernels/optimizer.h"
#include "kernels/state_format.h"
#include "proto/contract/segments.h"

namespace shardd::bench {
namespace {

constexpr uint32_t kChunk = 64 * 1024;

struct Options {
  bool json = false;
  uint64_t elements = 100'000'000;
  int pairs = 9;
  double patience = 30;
  std::string optimizer;  // empty: all
  std::string format;     // empty: all
};

struct Format {
  const char* name;
  kernels::StateFormat state;
};
constexpr Format kFormats[] = {
    {"fp32", {}},
    {"split", {kernels::MasterFormat::kSplit, kernels::MomentFormat::kFloat32}},
    {"bf16", {kernels::MasterFormat::kFloat32, kernels::MomentFormat::kBFloat16}},
    {"bf16+split", {kernels::MasterFormat::kSplit, kernels::MomentFormat::kBFloat16}},
};

// The records of one optimizer, with a bf16 gradient and a bf16 weight stream.
class Update {
 public:
  Update(const kernels::Optimizer& optimizer, const kernels::StateFormat& format, uint64_t elements,
         Threads* threads)
      : optimizer_(optimizer),
        format_(format),
        shape_{optimizer.num_states(), format.master_bytes(), format.moment_bytes()},
        chunks_(elements / kChunk),
        record_(contract::ChunkRecordBytes(kChunk, shape_)),
        records_(chunks_ * record_),
        grads_(chunks_ * kChunk * 2),
        weights_(chunks_ * kChunk * 2),
        threads_(threads) {
    std::vector<float> values(kChunk);
    for (uint32_t i = 0; i < kChunk; ++i) values[i] = 1e-3f * static_cast<float>(i % 1000 + 1);
    threads_->Run([&](size_t t) {
      for (uint64_t c = t; c < chunks_; c += threads_->count()) {
        std::memset(records_.data() + c * record_, 0, record_);
        const kernels::StateArrays arrays = Arrays(c);
        kernels::WriteMaster(kernels::BestIsa(), format_, arrays, kChunk, values.data());
        for (size_t s = 0; s < static_cast<size_t>(shape_.moments); ++s) {
          kernels::WriteMoment(kernels::BestIsa(), format_, arrays, s, kChunk, values.data());
        }
        kernels::Fp32ToGrad(kernels::BestIsa(), values.data(), kChunk,
                            grads_.data() + c * kChunk * 2, kernels::DType::kBFloat16);
      }
    });
    hyper_.lr = 1e-6;
    hyper_.momentum = 0.9;
  }

  // One pass over everything; bytes read plus bytes written, per second.
  double BytesPerSecond() {
    const kernels::StepScalars scalars = optimizer_.Step(hyper_, &progress_);
    ++epoch_;
    const double start = Now();
    std::atomic<uint64_t> next{0};
    threads_->Run([&](size_t) {
      const kernels::ScopedFlushToZero flush;
      for (uint64_t c = next++; c < chunks_; c = next++) {
        std::byte* const r = records_.data() + c * record_;
        kernels::UpdateRun run;
        run.grad = grads_.data() + c * kChunk * 2;
        run.weight = weights_.data() + c * kChunk * 2;
        run.count = kChunk;
        run.grad_dtype = kernels::DType::kBFloat16;
        run.weight_dtype = kernels::DType::kBFloat16;
        run.scalars = &scalars;
        run.undo = reinterpret_cast<kernels::UndoLog*>(r + contract::kUndoOffset);
        run.undo_epoch = epoch_;
        kernels::UpdateState(optimizer_, kernels::BestIsa(), format_, Arrays(c), run);
        kernels::StoreFence();
      }
    });
    return static_cast<double>(elements()) * bytes_per_element() / (Now() - start);
  }

  uint64_t elements() const { return chunks_ * kChunk; }
  // Master and states both ways, the gradient in, the weight out; of a split master in as well.
  double bytes_per_element() const {
    return 2.0 * static_cast<double>(shape_.master_bytes) +
           2.0 * shape_.moments * static_cast<double>(shape_.moment_bytes) + 2.0 +
           (format_.split() ? 4.0 : 2.0);
  }

 private:
  kernels::StateArrays Arrays(uint64_t chunk) {
    std::byte* const r = records_.data() + chunk * record_;
    kernels::StateArrays arrays;
    arrays.master = r + contract::MasterOffset();
    for (int s = 0; s < shape_.moments; ++s) {
      arrays.moments[static_cast<size_t>(s)] = r + contract::MomentOffset(kChunk, s, shape_);
    }
    arrays.weights = reinterpret_cast<uint16_t*>(weights_.data()) + chunk * kChunk;
    return arrays;
  }

  const kernels::Optimizer& optimizer_;
  const kernels::StateFormat format_;
  const contract::StateShape shape_;
  const uint64_t chunks_;
  const size_t record_;
  Buffer records_, grads_, weights_;
  Threads* threads_;
  kernels::Hyperparameters hyper_;
  kernels::StepProgress progress_;
  uint32_t epoch_ = 0;
};

void BenchOptimizer(const Options& options, const Reporter& report, std::string_view name,
                    const Format& format, Threads* threads, MemcpyReference* reference) {
  Update update(*kernels::FindOptimizer(name), format.state, options.elements, threads);
  const Pairs pairs = Interleave(
      options.pairs, options.patience, [&] { return reference->BytesPerSecond(); },
      [&] { return update.BytesPerSecond(); });
  report.Line("kernels.update",
              {{"optimizer", std::string(name)},
               {"states", format.name},
               {"grad", "bf16"},
               {"weights", "bf16"},
               {"isa", kernels::IsaName(kernels::BestIsa())}},
              {{"threads", static_cast<double>(threads->count())},
               {"elements", static_cast<double>(update.elements())},
               {"bytes_per_element", update.bytes_per_element()},
               {"elements_per_second", pairs.bytes_per_second / update.bytes_per_element()},
               {"gigabytes_per_second", pairs.bytes_per_second / 1e9},
               {"memcpy_gigabytes_per_second", pairs.reference_bytes_per_second / 1e9},
               {"ratio_to_memcpy", pairs.ratio},
               {"others_busy", pairs.busy}});
}

size_t AllThreads() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? static_cast<size_t>(CPU_COUNT(&set)) : 1;
}

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const auto value = [&](const char* name) -> const char* {
      const std::string prefix = std::string(name) + "=";
      return argument.rfind(prefix, 0) == 0 ? argv[i] + prefix.size() : nullptr;
    };
    if (argument == "--json") {
      options.json = true;
    } else if (const char* v = value("--elements")) {
      options.elements = std::strtoull(v, nullptr, 10);
    } else if (const char* v = value("--pairs")) {
      options.pairs = std::atoi(v);
    } else if (const char* v = value("--patience")) {
      options.patience = std::atof(v);
    } else if (const char* v = value("--optimizer")) {
      options.optimizer = v;
    } else if (const char* v = value("--format")) {
      options.format = v;
    } else {
      std::fprintf(stderr,
                   "bench kernels: unknown flag '%s'; there are: --json --elements=N --pairs=N "
                   "--patience=SECONDS --optimizer=NAME --format=NAME\n",
                   argument.c_str());
      return 2;
    }
  }
  if (!options.optimizer.empty() && kernels::FindOptimizer(options.optimizer) == nullptr) {
    std::fprintf(stderr, "bench kernels: there is no optimizer '%s'\n", options.optimizer.c_str());
    return 2;
  }
  std::string formats;
  bool known = options.format.empty();
  for (const Format& format : kFormats) {
    formats += std::string(" ") + format.name;
    known = known || options.format == format.name;
  }
  if (!known) {
    std::fprintf(stderr, "bench kernels: there is no format '%s'; there are:%s\n",
                 options.format.c_str(), formats.c_str());
    return 2;
  }
  options.elements = (options.elements + kChunk - 1) / kChunk * kChunk;
  const Reporter report(options.json);
  std::vector<size_t> counts = {1};
  if (AllThreads() > 1) counts.push_back(AllThreads());
  for (const size_t count : counts) {
    Threads threads(count);
    MemcpyReference reference(512 << 20, &threads);
    for (const std::string_view name : kernels::OptimizerNames()) {
      if (!options.optimizer.empty() && name != options.optimizer) continue;
      for (const Format& format : kFormats) {
        if (!options.format.empty() && options.format != format.name) continue;
        BenchOptimizer(options, report, name, format, &threads, &reference);
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace shardd::bench

int main(int argc, char** argv) { return shardd::bench::Main(argc, argv); }
