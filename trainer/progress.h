// What a person sees of a run.
#ifndef SHARDD_TRAINER_PROGRESS_H_
#define SHARDD_TRAINER_PROGRESS_H_

#include <cstdint>
#include <cstdio>
#include <string>

#include "client/client.h"

namespace shardd::trainer {

// A bar that is redrawn on a terminal; elsewhere a line now and then (about twenty
// in a run). Messages go on lines of their own, also while a bar stands.
class Progress {
 public:
  struct Options {
    std::FILE* out = stdout;
    bool terminal = false;
    bool enabled = true;  // of steps; messages are always printed
    uint64_t steps = 1;
    int columns = 80;
  };
  explicit Progress(const Options& options) : options_(options) {}
  ~Progress() { EndBar(); }

  // After each step. `seconds_left` < 0: not known.
  void Step(const StepRecord& record, double tokens_per_second, double seconds_left);
  void Message(const std::string& line);

 private:
  void EndBar();

  const Options options_;
  bool bar_ = false;
};

// "0:35", "1:02:03".
std::string Duration(double seconds);

}  // namespace shardd::trainer

#endif  // SHARDD_TRAINER_PROGRESS_H_
