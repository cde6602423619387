#include "bench/measure.h"

#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <sstream>
#include <thread>

namespace shardd::bench {

namespace {

// Jiffies of all CPUs: {busy, all}.
std::pair<double, double> CpuTimes() {
  std::ifstream stat("/proc/stat");
  std::string cpu;
  double user = 0, nice = 0, system = 0, idle = 0, iowait = 0, irq = 0, softirq = 0, steal = 0;
  stat >> cpu >> user >> nice >> system >> idle >> iowait >> irq >> softirq >> steal;
  const double busy = user + nice + system + irq + softirq + steal;
  return {busy, busy + idle + iowait};
}

}  // namespace

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

double WaitForIdle(double patience_seconds) {
  const double deadline = Now() + patience_seconds;
  double busy = 1;
  do {
    const auto before = CpuTimes();
    usleep(100'000);
    const auto after = CpuTimes();
    busy = (after.first - before.first) / std::max(after.second - before.second, 1.0);
  } while (busy > 0.05 && Now() < deadline);
  return busy;
}

struct Threads::State {
  std::mutex mutex;
  std::condition_variable changed;
  const std::function<void(size_t)>* fn = nullptr;
  uint64_t round = 0;
  size_t running = 0;
  bool stop = false;
  std::vector<std::thread> threads;
};

Threads::Threads(size_t count) : state_(new State()) {
  for (size_t i = 0; i < count; ++i) {
    state_->threads.emplace_back([this, i] {
      State& s = *state_;
      uint64_t seen = 0;
      std::unique_lock lock(s.mutex);
      while (true) {
        s.changed.wait(lock, [&] { return s.stop || s.round != seen; });
        if (s.stop) return;
        seen = s.round;
        lock.unlock();
        (*s.fn)(i);
        lock.lock();
        if (--s.running == 0) s.changed.notify_all();
      }
    });
  }
}

Threads::~Threads() {
  {
    std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
  state_->changed.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
  delete state_;
}

size_t Threads::count() const { return state_->threads.size(); }

void Threads::Run(const std::function<void(size_t)>& fn) {
  std::unique_lock lock(state_->mutex);
  state_->fn = &fn;
  state_->running = count();
  ++state_->round;
  state_->changed.notify_all();
  state_->changed.wait(lock, [&] { return state_->running == 0; });
}

Buffer::Buffer(size_t bytes) : bytes_((bytes + (2 << 20) - 1) & ~size_t{(2 << 20) - 1}) {
  void* data = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    std::fprintf(stderr, "bench: cannot get %zu bytes of memory\n", bytes_);
    std::exit(1);
  }
  madvise(data, bytes_, MADV_HUGEPAGE);
  std::memset(data, 1, bytes_);
  data_ = static_cast<std::byte*>(data);
}

Buffer::~Buffer() { munmap(data_, bytes_); }

MemcpyReference::MemcpyReference(size_t bytes, Threads* threads)
    : from_(bytes), to_(bytes), threads_(threads) {}

double MemcpyReference::BytesPerSecond() {
  const size_t n = threads_->count();
  const size_t part = from_.bytes() / n & ~size_t{4095};
  const double start = Now();
  threads_->Run(
      [&](size_t i) { std::memcpy(to_.data() + i * part, from_.data() + i * part, part); });
  return 2.0 * static_cast<double>(part * n) / (Now() - start);
}

Pairs Interleave(int pairs, double patience_seconds, const std::function<double()>& reference,
                 const std::function<double()>& run) {
  Pairs result;
  reference();
  run();  // both warm
  std::vector<double> rates, references, ratios;
  for (int i = 0; i < pairs; ++i) {
    result.busy = std::max(result.busy, WaitForIdle(patience_seconds));
    const double before = reference();
    const double rate = run();
    const double beside = (before + reference()) / 2;
    rates.push_back(rate);
    references.push_back(beside);
    ratios.push_back(rate / beside);
  }
  result.bytes_per_second = Median(rates);
  result.reference_bytes_per_second = Median(references);
  result.ratio = Median(ratios);
  return result;
}

void Reporter::Line(const std::string& figure,
                    const std::vector<std::pair<std::string, std::string>>& labels,
                    const std::vector<Field>& fields) const {
  std::ostringstream out;
  char number[64];
  if (json_) {
    out << "{\"figure\":\"" << figure << "\"";
    for (const auto& [name, value] : labels) out << ",\"" << name << "\":\"" << value << "\"";
    for (const auto& [name, value] : fields) {
      std::snprintf(number, sizeof(number), "%.6g", value);
      out << ",\"" << name << "\":" << number;
    }
    out << "}";
  } else {
    std::snprintf(number, sizeof(number), "%-26s", figure.c_str());
    out << number;
    for (const auto& [name, value] : labels) out << "  " << name << "=" << value;
    for (const auto& [name, value] : fields) {
      std::snprintf(number, sizeof(number), "%.4g", value);
      out << "  " << name << "=" << number;
    }
  }
  std::puts(out.str().c_str());
  std::fflush(stdout);
}

}  // namespace shardd::bench
