// What `train` can be told.
#ifndef SHARDD_TRAINER_TRAIN_OPTIONS_H_
#define SHARDD_TRAINER_TRAIN_OPTIONS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/client.h"
#include "trainer/models/gpt2.h"
#include "trainer/schedule.h"

namespace shardd::trainer {

struct TrainOptions {
  bool help = false;

  std::vector<std::string> data;
  std::string heldout;

  models::Gpt2Config model;
  JobOptions job;
  Resume resume = Resume::kAuto;
  std::string address;  // empty: as the environment says

  uint64_t steps = 600;
  Schedule schedule;
  int64_t sequences = 8;  // per slot
  uint64_t seed = 1;
  int threads = 1;

  std::string metrics;
  std::string export_master;
  bool progress = true;

  uint64_t tokens_per_step() const {
    return static_cast<uint64_t>(job.slots) * sequences * model.context;
  }
};

// From the arguments (without argv[0]); slots default to `world_size`.
// kInvalidArgument names the flag and the remedy.
absl::StatusOr<TrainOptions> ParseTrainOptions(const std::vector<std::string>& arguments,
                                               uint32_t world_size);

// What --help prints.
std::string TrainHelp();

}  // namespace shardd::trainer

#endif  // SHARDD_TRAINER_TRAIN_OPTIONS_H_
