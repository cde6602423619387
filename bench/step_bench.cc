// bench/run step: what a step costs outside forward and backward.
//
// Rows: the fused update through the kernel; the same through a live daemon, from the
// decision to the last bucket's ready word; both beside memcpy on as many threads. The
// update with subnormal second moments beside the normal one. The doorbell's round trip.
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bench/bench_daemon.h"
#include "bench/live_job.h"
#include "bench/measure.h"
#include "client/client.h"
#include "kernels/cast.h"
#include "kernels/isa.h"
#include "kernels/optimizer.h"
#include "proto/contract/segments.h"

namespace shardd::bench {
namespace {

constexpr uint32_t kChunk = 65536;

struct Options {
  bool json = false;
  uint64_t elements = 100'000'000;
  int pairs = 9;
  double patience = 10;  // seconds to wait for an idle machine before each pair
  size_t threads = 0;
  std::string daemon;
};

// Chunk records as the daemon's store lays them out, with gradient and weight streams.
class KernelUpdate {
 public:
  KernelUpdate(uint64_t elements, kernels::DType grad, float moment2, Threads* threads)
      : chunks_(elements / kChunk),
        record_(contract::ChunkRecordBytes(kChunk, {.moments = 2})),
        grad_dtype_(grad),
        records_(chunks_ * record_),
        grads_(chunks_ * kChunk * kernels::DTypeSize(grad)),
        weights_(chunks_ * kChunk * 2),
        threads_(threads) {
    std::vector<float> values(kChunk);
    for (uint32_t i = 0; i < kChunk; ++i) values[i] = 1e-3f * static_cast<float>(i % 1000 + 1);
    threads_->Run([&](size_t t) {
      for (uint64_t c = t; c < chunks_; c += threads_->count()) {
        std::byte* r = records_.data() + c * record_;
        std::memset(r, 0, record_);
        std::memcpy(r + contract::MasterOffset(), values.data(), kChunk * 4);
        auto* v = reinterpret_cast<float*>(r + contract::MomentOffset(kChunk, 1));
        for (uint32_t i = 0; i < kChunk; ++i) v[i] = moment2;
        kernels::Fp32ToGrad(kernels::BestIsa(), values.data(), kChunk,
                            grads_.data() + c * kChunk * kernels::DTypeSize(grad), grad);
      }
    });
    hyper_.lr = 1e-4;
    // Zero gradients keep a subnormal second moment subnormal.
    if (moment2 < 1e-37f) std::memset(grads_.data(), 0, grads_.bytes());
  }

  // One pass over everything; elements per second.
  double Run() {
    const kernels::Optimizer* adamw = kernels::FindOptimizer("adamw");
    const kernels::StepScalars scalars = adamw->Step(hyper_, &products_);
    ++epoch_;
    const double start = Now();
    // Chunks are handed out one by one, as the daemon does.
    std::atomic<uint64_t> next{0};
    threads_->Run([&](size_t) {
      const kernels::ScopedFlushToZero flush;
      for (uint64_t c = next++; c < chunks_; c = next++) {
        std::byte* r = records_.data() + c * record_;
        kernels::UpdateRun run;
        run.master = reinterpret_cast<float*>(r + contract::MasterOffset());
        run.state = {reinterpret_cast<float*>(r + contract::MomentOffset(kChunk, 0)),
                     reinterpret_cast<float*>(r + contract::MomentOffset(kChunk, 1))};
        run.grad = grads_.data() + c * kChunk * kernels::DTypeSize(grad_dtype_);
        run.weight = weights_.data() + c * kChunk * 2;
        run.count = kChunk;
        run.grad_dtype = grad_dtype_;
        run.weight_dtype = kernels::DType::kBFloat16;
        run.scalars = &scalars;
        run.undo = reinterpret_cast<kernels::UndoLog*>(r + contract::kUndoOffset);
        run.undo_epoch = epoch_;
        adamw->Update(kernels::BestIsa(), run);
        kernels::StoreFence();
      }
    });
    return static_cast<double>(elements()) / (Now() - start);
  }

  uint64_t elements() const { return chunks_ * kChunk; }
  // Read and written: master and two moments both ways, the gradient in, the weight out.
  double bytes_per_element() const {
    return 24.0 + static_cast<double>(kernels::DTypeSize(grad_dtype_)) + 2.0;
  }

 private:
  uint64_t chunks_;
  size_t record_;
  kernels::DType grad_dtype_;
  Buffer records_, grads_, weights_;
  Threads* threads_;
  kernels::Hyperparameters hyper_;
  kernels::StepProgress products_;
  uint32_t epoch_ = 0;
};

std::string GradName(kernels::DType dtype) {
  return dtype == kernels::DType::kFloat32 ? "fp32" : "bf16";
}

void ReportUpdate(const Reporter& report, const std::string& figure, const std::string& grad,
                  const Options& options, double bytes_per_element, const Pairs& pairs,
                  std::vector<Reporter::Field> more = {}) {
  std::vector<Reporter::Field> fields = {
      {"elements", static_cast<double>(options.elements)},
      {"threads", static_cast<double>(options.threads)},
      {"bytes_per_element", bytes_per_element},
      {"elements_per_second", pairs.bytes_per_second / bytes_per_element},
      {"gigabytes_per_second", pairs.bytes_per_second / 1e9},
      {"memcpy_gigabytes_per_second", pairs.reference_bytes_per_second / 1e9},
      {"ratio_to_memcpy", pairs.ratio},
      {"others_busy", pairs.busy}};
  fields.insert(fields.end(), more.begin(), more.end());
  report.Line(figure,
              {{"grad", grad}, {"weights", "bf16"}, {"isa", kernels::IsaName(kernels::BestIsa())}},
              fields);
}

void BenchKernel(const Options& options, const Reporter& report, Threads* threads,
                 MemcpyReference* memcpy_reference) {
  for (kernels::DType grad : {kernels::DType::kBFloat16, kernels::DType::kFloat32}) {
    KernelUpdate update(options.elements, grad, 1e-4f, threads);
    const double bytes = update.bytes_per_element();
    const Pairs pairs = Interleave(
        options.pairs, options.patience, [&] { return memcpy_reference->BytesPerSecond(); },
        [&] { return update.Run() * bytes; });
    ReportUpdate(report, "step.update.kernel", GradName(grad), options, bytes, pairs);
  }
  KernelUpdate normal(options.elements / 2, kernels::DType::kBFloat16, 1e-4f, threads);
  KernelUpdate subnormal(options.elements / 2, kernels::DType::kBFloat16, 1e-39f, threads);
  const Pairs pairs = Interleave(
      options.pairs, options.patience, [&] { return normal.Run(); },
      [&] { return subnormal.Run(); });
  report.Line("step.update.subnormal", {{"grad", "bf16"}},
              {{"elements_per_second", pairs.bytes_per_second},
               {"normal_elements_per_second", pairs.reference_bytes_per_second},
               {"ratio_to_normal", pairs.ratio},
               {"others_busy", pairs.busy}});
}

void BenchLive(const Options& options, const Reporter& report, MemcpyReference* memcpy_reference) {
  BenchDaemon daemon(options.daemon, {});
  for (uint32_t slots : {1u, 2u}) {
    LiveJob job({daemon.socket(), "bench" + std::to_string(slots), options.elements, slots,
                 Durability::kProcess, 0});
    // One slot: the sum stays bf16; more: it is fp32.
    const double bytes = slots == 1 ? 28.0 : 30.0;
    std::vector<double> publish, decide, update;
    const Pairs pairs = Interleave(
        options.pairs, options.patience, [&] { return memcpy_reference->BytesPerSecond(); },
        [&] {
          const LiveJob::Times t = job.Step();
          publish.push_back(t.publish);
          decide.push_back(t.decide);
          update.push_back(t.update);
          return static_cast<double>(options.elements) * bytes / t.update;
        });
    ReportUpdate(report, "step.update.daemon", slots == 1 ? "bf16" : "fp32", options, bytes, pairs,
                 {{"slots", static_cast<double>(slots)},
                  {"huge_pages", daemon.huge_pages() ? 1.0 : 0.0},
                  {"publish_ms", Median(publish) * 1e3},
                  {"decide_ms", Median(decide) * 1e3},
                  {"update_ms", Median(update) * 1e3},
                  {"outside_forward_backward_ms", (Median(decide) + Median(update)) * 1e3}});
  }
}

// Publishing one small bucket until its ring space is free again.
void BenchDoorbell(const Options& options, const Reporter& report) {
  for (const bool spinning : {true, false}) {
    BenchDaemon daemon(options.daemon, {spinning ? "--step.spin_microseconds=1000000"
                                                 : "--step.spin_microseconds=0.001"});
    DoorbellProbe probe(daemon.socket(), spinning);
    WaitForIdle(options.patience);
    std::vector<double> micros;
    for (int i = 0; i < 2000; ++i) micros.push_back(probe.RoundTripSeconds() * 1e6);
    std::sort(micros.begin(), micros.end());
    report.Line("step.doorbell", {{"daemon", spinning ? "spinning" : "sleeping"}},
                {{"round_trip_us_median", Median(micros)},
                 {"round_trip_us_p99", micros[micros.size() * 99 / 100]}});
  }
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
    } else if (const char* v = value("--threads")) {
      options.threads = static_cast<size_t>(std::atoi(v));
    } else if (const char* v = value("--daemon")) {
      options.daemon = v;
    } else {
      std::fprintf(stderr,
                   "bench step: unknown flag '%s'; there are: --json --elements=N --pairs=N "
                   "--threads=N --patience=SECONDS --daemon=PATH\n",
                   argument.c_str());
      return 2;
    }
  }
  options.elements = (options.elements + kChunk - 1) / kChunk * kChunk;
  if (options.threads == 0) {
    cpu_set_t set;
    options.threads =
        sched_getaffinity(0, sizeof(set), &set) == 0 ? static_cast<size_t>(CPU_COUNT(&set)) : 1;
  }
  const Reporter report(options.json);
  {
    Threads threads(options.threads);
    MemcpyReference reference(512 << 20, &threads);
    BenchKernel(options, report, &threads, &reference);
    BenchLive(options, report, &reference);
  }
  BenchDoorbell(options, report);
  return 0;
}

}  // namespace
}  // namespace shardd::bench

int main(int argc, char** argv) { return shardd::bench::Main(argc, argv); }
