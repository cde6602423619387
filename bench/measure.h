// How a figure is taken: on an idle machine, each run beside a reference in the same
// breath, the median of the pairs' ratios.
#ifndef SHARDD_BENCH_MEASURE_H_
#define SHARDD_BENCH_MEASURE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace shardd::bench {

// Seconds of a steady clock.
double Now();

// The middle value (the mean of the two middle ones).
double Median(std::vector<double> values);

// Waits until nothing else keeps the CPUs busy, for up to `patience_seconds`. Returns
// the share of CPU time that others took in the last look.
double WaitForIdle(double patience_seconds);

// Threads that a memcpy or a loop fans out over, started once.
class Threads {
 public:
  explicit Threads(size_t count);
  ~Threads();
  Threads(const Threads&) = delete;
  size_t count() const;
  // Runs fn(thread) on each and waits. `prepare` ran once in each at the start.
  void Run(const std::function<void(size_t thread)>& fn);

 private:
  struct State;
  State* state_;
};

// Memory for streams: huge pages where the kernel gives them, touched.
class Buffer {
 public:
  explicit Buffer(size_t bytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* data_;
  size_t bytes_;
};

// The reference: copies half of its memory over the other half on all threads.
class MemcpyReference {
 public:
  MemcpyReference(size_t bytes, Threads* threads);
  // One copy; bytes read plus bytes written, per second.
  double BytesPerSecond();

 private:
  Buffer from_, to_;
  Threads* threads_;
};

struct Pairs {
  double bytes_per_second = 0;            // median
  double reference_bytes_per_second = 0;  // median
  double ratio = 0;                       // median of the pairs' ratios
  double busy = 0;                        // largest share of CPU that others had
};

// `pairs` times: idle (waited for as WaitForIdle does), the reference, `run` (which returns bytes
// per second), the reference again; a pair's reference is the mean of the two around it.
Pairs Interleave(int pairs, double patience_seconds, const std::function<double()>& reference,
                 const std::function<double()>& run);

// One figure as a JSON line or a table's line on stdout.
class Reporter {
 public:
  explicit Reporter(bool json) : json_(json) {}
  using Field = std::pair<std::string, double>;
  void Line(const std::string& figure,
            const std::vector<std::pair<std::string, std::string>>& labels,
            const std::vector<Field>& fields) const;

 private:
  bool json_;
};

}  // namespace shardd::bench

#endif  // SHARDD_BENCH_MEASURE_H_
