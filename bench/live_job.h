// One rank of a job at a live daemon, whose gradients are the same memory at every step.
#ifndef SHARDD_BENCH_LIVE_JOB_H_
#define SHARDD_BENCH_LIVE_JOB_H_

#include <cstdint>
#include <memory>
#include <string>

#include "client/client.h"

namespace shardd::bench {

class LiveJob {
 public:
  struct Options {
    std::string socket;
    std::string name;
    uint64_t elements = 0;
    uint32_t slots = 1;
    Durability durability = Durability::kDefault;
    // How long a backward takes at least: gradients are handed over evenly over it.
    double backward_seconds = 0;
  };
  // Opens the job and uploads its weights. Ends the process when something fails.
  explicit LiveJob(const Options& options);
  ~LiveJob();

  struct Times {
    double publish = 0;  // filling and handing over all gradients
    double decide = 0;   // EndStep to the decision
    double update = 0;   // the decision to the last bucket's ready word
  };
  Times Step();

 private:
  const Options options_;
  std::unique_ptr<Session> session_;
};

}  // namespace shardd::bench

#endif  // SHARDD_BENCH_LIVE_JOB_H_
