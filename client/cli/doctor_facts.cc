#include "client/cli/doctor_facts.h"

#include <fcntl.h>
#include <glob.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "proto/contract/fd_passing.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace shardd::cli {

namespace {

constexpr char kSystemState[] = "/run/shardd/state";

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// Later files override earlier ones, as systemd reads them.
std::string LogindConfiguration() {
  std::string text = ReadFile("/etc/systemd/logind.conf");
  for (const char* pattern :
       {"/usr/lib/systemd/logind.conf.d/*.conf", "/run/systemd/logind.conf.d/*.conf",
        "/etc/systemd/logind.conf.d/*.conf"}) {
    glob_t found;
    if (glob(pattern, 0, nullptr, &found) == 0) {
      for (size_t i = 0; i < found.gl_pathc; ++i) {
        absl::StrAppend(&text, "\n", ReadFile(found.gl_pathv[i]));
      }
    }
    globfree(&found);
  }
  return text;
}

void GatherLimits(SystemFacts* facts) {
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  facts->memlock_bytes = limit.rlim_cur == RLIM_INFINITY ? kUnlimited : limit.rlim_cur;
  struct sysinfo info {};
  sysinfo(&info);
  facts->swap_bytes = info.totalswap * info.mem_unit;
  facts->memory_bytes = info.totalram * info.mem_unit;
}

void GatherState(SystemFacts* facts) {
  std::string mounts = ReadFile("/proc/self/mountinfo");
  std::optional<MountInfo> mount = FindMount(mounts, facts->state_directory);
  if (mount) {
    facts->state_on_tmpfs = mount->type == "tmpfs";
    facts->state_huge = mount->huge;
  }
  // It need not be there yet: what it will lie on is.
  struct statfs info {};
  std::string path = facts->state_directory;
  while (statfs(path.c_str(), &info) != 0 && path.rfind('/') != std::string::npos && path != "/") {
    path = path.substr(0, std::max<size_t>(1, path.rfind('/')));
  }
  facts->state_total_bytes = info.f_blocks * static_cast<uint64_t>(info.f_bsize);
  facts->state_free_bytes = info.f_bavail * static_cast<uint64_t>(info.f_bsize);
}

void GatherCpus(SystemFacts* facts) {
  facts->online_cpus = static_cast<uint32_t>(sysconf(_SC_NPROCESSORS_ONLN));
  cpu_set_t set;
  CPU_ZERO(&set);
  // Machines with more CPUs than a cpu_set_t holds: all of those online.
  facts->allowed_cpus = sched_getaffinity(0, sizeof(set), &set) == 0
                            ? static_cast<uint32_t>(CPU_COUNT(&set))
                            : facts->online_cpus;
  std::string group = ReadFile("/proc/self/cgroup");
  size_t unified = group.find("0::");
  if (unified == std::string::npos) return;
  std::string path = group.substr(unified + 3, group.find('\n', unified) - unified - 3);
  facts->quota_cpus = ParseCpuMax(ReadFile(absl::StrCat("/sys/fs/cgroup", path, "/cpu.max")));
}

void GatherKernel(SystemFacts* facts) {
  utsname name{};
  uname(&name);
  facts->kernel = name.release;
  contract::UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
  facts->has_pidfd = static_cast<bool>(pidfd);
  contract::UniqueFd memfd(memfd_create("doctor", MFD_CLOEXEC));
  facts->has_memfd = static_cast<bool>(memfd);
  void* page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page != MAP_FAILED) {
    facts->has_populate = madvise(page, 4096, MADV_POPULATE_WRITE) == 0;
    munmap(page, 4096);
  }
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0) {
    contract::UniqueFd ends[2] = {contract::UniqueFd(pair[0]), contract::UniqueFd(pair[1])};
    int peer = -1;
    socklen_t size = sizeof(peer);
    facts->has_peer_pidfd = getsockopt(pair[0], SOL_SOCKET, SO_PEERPIDFD, &peer, &size) == 0;
    if (facts->has_peer_pidfd) close(peer);
  }
}

bool LockIsFree(const std::string& path) {
  const contract::UniqueFd lock(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  return lock && flock(lock.get(), LOCK_SH | LOCK_NB) == 0;
}

std::vector<std::string> Glob(const std::string& pattern) {
  std::vector<std::string> paths;
  glob_t found;
  if (glob(pattern.c_str(), 0, nullptr, &found) == 0) {
    paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  }
  globfree(&found);
  return paths;
}

}  // namespace

std::vector<std::pair<std::string, uint64_t>> FindOrphans(
    const std::vector<std::string>& patterns) {
  std::vector<std::pair<std::string, uint64_t>> orphans;
  for (const std::string& pattern : patterns) {
    for (const std::string& directory : Glob(pattern)) {
      uint64_t bytes = 0;
      for (const std::string& file : Glob(directory + "/jobs/*/*")) {
        struct stat info {};
        if (lstat(file.c_str(), &info) == 0) bytes += static_cast<uint64_t>(info.st_blocks) * 512;
      }
      if (bytes > 0 && LockIsFree(directory + "/lock")) orphans.emplace_back(directory, bytes);
    }
  }
  return orphans;
}

SystemFacts GatherFacts(uid_t uid, const std::string& state_directory) {
  SystemFacts facts;
  facts.uid = uid;
  facts.state_directory = state_directory;
  if (facts.state_directory.empty()) {
    facts.state_directory =
        access(kSystemState, W_OK) == 0 ? kSystemState : absl::StrCat("/dev/shm/shardd-", uid);
  }
  GatherLimits(&facts);
  GatherState(&facts);
  GatherCpus(&facts);
  GatherKernel(&facts);
  facts.orphaned_state = FindOrphans({"/dev/shm/shardd-*", "/dev/shm/shardd-*/*", kSystemState});
  facts.systemd_runs = access("/run/systemd/system", F_OK) == 0;
  facts.remove_ipc = ParseRemoveIpc(LogindConfiguration()).value_or(true);
  return facts;
}

}  // namespace shardd::cli
