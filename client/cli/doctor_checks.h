// What shardctl doctor finds in what it knows of a machine.
#ifndef SHARDD_CLIENT_CLI_DOCTOR_CHECKS_H_
#define SHARDD_CLIENT_CLI_DOCTOR_CHECKS_H_

#include <sys/types.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace shardd::cli {

enum class Severity {
  kOk,
  kWarning,  // works, with a cost that the finding names
  kProblem,  // something will not work
};

struct Finding {
  std::string check;
  Severity severity = Severity::kOk;
  std::string detail;
  std::string remedy;  // empty when kOk
};

inline constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

struct SystemFacts {
  uid_t uid = 0;
  uint64_t memlock_bytes = 0;  // soft limit, kUnlimited for none
  uint64_t swap_bytes = 0;
  uint64_t memory_bytes = 0;

  // The daemon's, or the one that a daemon started now would use.
  std::string state_directory;
  bool state_on_tmpfs = false;
  std::string state_huge;  // the tmpfs's huge= option: "always", "advise", ...; empty: none
  uint64_t state_total_bytes = 0;
  uint64_t state_free_bytes = 0;

  // Other state directories that hold jobs and whose lock nobody holds: path and bytes.
  std::vector<std::pair<std::string, uint64_t>> orphaned_state;

  bool systemd_runs = false;
  // logind's RemoveIPC; its default is yes.
  bool remove_ipc = true;

  uint32_t online_cpus = 0;
  uint32_t allowed_cpus = 0;         // of the affinity mask, i.e. of the cpuset
  std::optional<double> quota_cpus;  // of the cgroup's cpu.max

  std::string kernel;
  bool has_pidfd = false;
  bool has_peer_pidfd = false;
  bool has_memfd = false;
  bool has_populate = false;  // MADV_POPULATE_WRITE

  std::string version;
  std::string daemon_version;  // empty: none answers
  std::string daemon_error;    // then: why not
};

// One finding a check, in a fixed order.
std::vector<Finding> Diagnose(const SystemFacts& facts);

// The value of RemoveIPC in the text of logind.conf files, the last one counting;
// nullopt when none sets it.
std::optional<bool> ParseRemoveIpc(const std::string& text);

struct MountInfo {
  std::string type;  // "tmpfs"
  std::string huge;  // value of the option huge=, or empty
};
// The mount that `path` lies on, from the text of /proc/self/mountinfo.
std::optional<MountInfo> FindMount(const std::string& mountinfo, const std::string& path);

// CPUs that a cgroup v2 cpu.max allows; nullopt: no limit, or not readable.
std::optional<double> ParseCpuMax(const std::string& text);

}  // namespace shardd::cli

#endif  // SHARDD_CLIENT_CLI_DOCTOR_CHECKS_H_
