#include "client/cli/doctor_checks.h"

#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/cli/output.h"

namespace shardd::cli {

namespace {

// logind leaves the IPC objects of system users alone.
constexpr uid_t kFirstUserUid = 1000;
// Less than this holds no model worth a daemon.
constexpr uint64_t kSmallStateDirectory = uint64_t{256} << 20;

Finding Ok(std::string check, std::string detail) {
  return {std::move(check), Severity::kOk, std::move(detail), ""};
}

Finding CheckMemlock(const SystemFacts& facts) {
  std::string limit =
      facts.memlock_bytes == kUnlimited ? "unlimited" : FormatBytes(facts.memlock_bytes);
  if (facts.memlock_bytes == kUnlimited || facts.swap_bytes == 0) {
    return Ok("memlock",
              absl::StrCat("limit ", limit, facts.swap_bytes == 0 ? "; there is no swap" : ""));
  }
  return {
      "memlock", Severity::kWarning,
      absl::StrCat("limit ", limit, ", and there is ", FormatBytes(facts.swap_bytes),
                   " of swap: state can be swapped out, and a step then waits for the disk"),
      "LimitMEMLOCK=infinity in the daemon's unit (shardd.service has it), 'ulimit -l unlimited' "
      "before shardd, or swapoff"};
}

Finding CheckHugePages(const SystemFacts& facts) {
  if (facts.state_huge == "always") {
    return Ok("huge pages", absl::StrCat(facts.state_directory, " is mounted huge=always"));
  }
  std::string detail =
      facts.state_on_tmpfs
          ? absl::StrCat(facts.state_directory, " has 4 KiB pages (huge=",
                         facts.state_huge.empty() ? "never" : facts.state_huge,
                         "): updates are some 12 % slower")
          : absl::StrCat(facts.state_directory, " is on no tmpfs: state would not be memory");
  return {
      "huge pages", facts.state_on_tmpfs ? Severity::kWarning : Severity::kProblem, detail,
      "as root: systemctl enable --now run-shardd-state.mount, or: mkdir -p /run/shardd/state && "
      "mount -t tmpfs -o huge=always,mode=0700 shardd-state /run/shardd/state; then "
      "store.directory"};
}

Finding CheckStateSize(const SystemFacts& facts) {
  std::string detail =
      absl::StrCat(facts.state_directory, ": ", FormatBytes(facts.state_free_bytes), " free of ",
                   FormatBytes(facts.state_total_bytes), "; the machine has ",
                   FormatBytes(facts.memory_bytes), " of memory");
  if (facts.state_free_bytes < kSmallStateDirectory) {
    return {"state size", Severity::kProblem, detail,
            "make room (shardctl jobs, shardctl job delete), or mount it larger: "
            "mount -o remount,size=BYTES"};
  }
  if (facts.state_total_bytes > facts.memory_bytes) {
    return {"state size", Severity::kWarning,
            absl::StrCat(detail, ": it can grow beyond that, and the kernel then kills processes"),
            "set memory.budget_bytes below the machine's memory, or mount it with size="};
  }
  return Ok("state size", detail);
}

Finding CheckOrphans(const SystemFacts& facts) {
  if (facts.orphaned_state.empty()) {
    return Ok("orphaned state", "no memory is held by a daemon that has ended");
  }
  std::string detail;
  for (const auto& [path, bytes] : facts.orphaned_state) {
    absl::StrAppend(&detail, detail.empty() ? "" : ", ", path, " (", FormatBytes(bytes), ")");
  }
  return {"orphaned state", Severity::kWarning,
          absl::StrCat("jobs of daemons that have ended hold memory: ", detail),
          "start a daemon on it (shardd --store.directory=PATH) to go on with its jobs, or remove "
          "the directory to give them up"};
}

Finding CheckRemoveIpc(const SystemFacts& facts) {
  bool at_risk = facts.systemd_runs && facts.remove_ipc && facts.uid >= kFirstUserUid &&
                 absl::StartsWith(facts.state_directory, "/dev/shm");
  if (!at_risk) {
    return Ok("RemoveIPC",
              facts.systemd_runs ? "logind leaves this state alone" : "no systemd-logind here");
  }
  return {"RemoveIPC", Severity::kWarning,
          absl::StrCat("logind deletes the files of user ", facts.uid,
                       " in /dev/shm at the last log-out: the jobs' state would be lost"),
          absl::StrCat("RemoveIPC=no in /etc/systemd/logind.conf, 'loginctl enable-linger ",
                       facts.uid, "', or the system's daemon (shardd.service)")};
}

Finding CheckCpus(const SystemFacts& facts) {
  std::string detail =
      absl::StrCat(facts.allowed_cpus, " of ", facts.online_cpus, " CPUs may be used");
  if (facts.quota_cpus && *facts.quota_cpus < facts.allowed_cpus) {
    return {"cpuset", Severity::kWarning,
            absl::StrCat(detail, ", but the cgroup's quota is ", FormatNumber(*facts.quota_cpus, 3),
                         ": threads beyond it are stopped in the middle of a step"),
            "raise cpu.max, or set step.threads to the quota"};
  }
  return Ok("cpuset", detail);
}

Finding CheckKernel(const SystemFacts& facts) {
  std::vector<std::string> missing;
  if (!facts.has_pidfd) missing.push_back("pidfd_open (5.3)");
  if (!facts.has_memfd) missing.push_back("memfd_create (3.17)");
  if (!facts.has_populate) missing.push_back("MADV_POPULATE_WRITE (5.14)");
  std::string list;
  for (const std::string& name : missing) absl::StrAppend(&list, list.empty() ? "" : ", ", name);
  if (!missing.empty()) {
    return {
        "kernel", Severity::kProblem,
        absl::StrCat("Linux ", facts.kernel, " lacks ", list, " (or a seccomp filter forbids it)"),
        "Linux 5.14 or newer; in a container, a seccomp profile that allows these calls"};
  }
  return Ok("kernel", absl::StrCat("Linux ", facts.kernel,
                                   ", pidfd_open, memfd_create, "
                                   "MADV_POPULATE_WRITE",
                                   facts.has_peer_pidfd ? ", SO_PEERPIDFD" : ""));
}

Finding CheckVersions(const SystemFacts& facts) {
  if (facts.daemon_version.empty()) {
    return {"versions", Severity::kWarning,
            absl::StrCat("shardctl ", facts.version, "; ", facts.daemon_error),
            "start shardd (systemctl start shardd), or let shardctl run start one"};
  }
  std::string detail = absl::StrCat("shardctl ", facts.version, ", shardd ", facts.daemon_version);
  if (facts.daemon_version == facts.version) return Ok("versions", detail);
  return {"versions", Severity::kWarning, detail,
          "install one version of both, and restart shardd"};
}

}  // namespace

std::vector<Finding> Diagnose(const SystemFacts& facts) {
  return {CheckKernel(facts),  CheckMemlock(facts), CheckHugePages(facts), CheckStateSize(facts),
          CheckOrphans(facts), CheckCpus(facts),    CheckRemoveIpc(facts), CheckVersions(facts)};
}

std::optional<bool> ParseRemoveIpc(const std::string& text) {
  std::optional<bool> value;
  for (absl::string_view raw : absl::StrSplit(text, '\n')) {
    absl::string_view line = absl::StripAsciiWhitespace(raw);
    if (!absl::StartsWith(line, "RemoveIPC")) continue;
    std::pair<absl::string_view, absl::string_view> setting =
        absl::StrSplit(line, absl::MaxSplits('=', 1));
    if (absl::StripAsciiWhitespace(setting.first) != "RemoveIPC") continue;
    std::string word = absl::AsciiStrToLower(absl::StripAsciiWhitespace(setting.second));
    value = word == "yes" || word == "true" || word == "on" || word == "1" || word == "y" ||
            word == "t";
  }
  return value;
}

std::optional<MountInfo> FindMount(const std::string& mountinfo, const std::string& path) {
  std::optional<MountInfo> found;
  size_t longest = 0;
  for (absl::string_view line : absl::StrSplit(mountinfo, '\n')) {
    // ID PARENT MAJOR:MINOR ROOT POINT OPTIONS [FIELDS...] - TYPE SOURCE SUPEROPTIONS
    std::vector<std::string> fields = absl::StrSplit(line, ' ', absl::SkipEmpty());
    size_t dash = 6;
    while (dash < fields.size() && fields[dash] != "-") ++dash;
    if (dash + 3 >= fields.size()) continue;
    const std::string& point = fields[4];
    bool above = point == "/" || path == point || absl::StartsWith(path, point + "/");
    // Of two mounts on one point the later hides the earlier.
    if (!above || point.size() < longest) continue;
    longest = point.size();
    MountInfo mount{fields[dash + 1], ""};
    for (absl::string_view option : absl::StrSplit(fields[dash + 3], ',')) {
      if (absl::ConsumePrefix(&option, "huge=")) mount.huge = std::string(option);
    }
    found = mount;
  }
  return found;
}

std::optional<double> ParseCpuMax(const std::string& text) {
  std::vector<std::string> fields = absl::StrSplit(text, absl::ByAnyChar(" \n"), absl::SkipEmpty());
  double quota;
  double period;
  if (fields.size() != 2 || !absl::SimpleAtod(fields[0], &quota) ||
      !absl::SimpleAtod(fields[1], &period) || period <= 0) {
    return std::nullopt;
  }
  return quota / period;
}

}  // namespace shardd::cli
