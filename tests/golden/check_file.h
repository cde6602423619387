// Checks one golden file of either form through a daemon.
#ifndef SHARDD_TESTS_GOLDEN_CHECK_FILE_H_
#define SHARDD_TESTS_GOLDEN_CHECK_FILE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace shardd::golden {

struct FileReport {
  // OK when everything is within the tolerances; kOutOfRange when something is not; else
  // why the file cannot be checked.
  absl::Status status;
  double worst = 0;                // in units of the tolerances, over all runs
  std::vector<std::string> lines;  // what was run and how far off it was

  // "PASS path: ..." or "FAIL path: ...", then the lines, indented.
  std::string Text(const std::string& path) const;
};

// Runs the file with one rank, and with several ranks and slots where it can be split.
// Each run is a job of its own whose name begins with `job_prefix`; the jobs are left
// in the daemon, their names in *jobs.
FileReport CheckFile(const std::string& socket, const std::string& path,
                     const std::string& job_prefix, std::vector<std::string>* jobs);

}  // namespace shardd::golden

#endif  // SHARDD_TESTS_GOLDEN_CHECK_FILE_H_
