#include "bench/bench_daemon.h"

#include <fcntl.h>
#include <immintrin.h>
#include <poll.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "bench/measure.h"
#include "tests/support/raw_session.h"

namespace shardd::bench {

namespace {

[[noreturn]] void Die(const std::string& why) {
  std::fprintf(stderr, "bench: %s\n", why.c_str());
  std::exit(1);
}

std::string MakeDirectory(const std::string& parent) {
  std::string path = parent + "/shardd-bench-XXXXXX";
  if (mkdtemp(path.data()) == nullptr) Die("cannot make a directory in " + parent);
  return path;
}

}  // namespace

BenchDaemon::BenchDaemon(const std::string& binary, std::vector<std::string> flags) {
  directory_ = MakeDirectory("/tmp");
  socket_ = directory_ + "/d.sock";
  state_ = MakeDirectory("/dev/shm");
  mounted_ = mount("tmpfs", state_.c_str(), "tmpfs", 0, "huge=always,mode=0700,size=90%") == 0;
  flags.insert(flags.begin(),
               {binary, "--listen.socket=" + socket_, "--store.directory=" + state_ + "/state"});
  std::vector<char*> argv;
  for (std::string& flag : flags) argv.push_back(flag.data());
  argv.push_back(nullptr);
  int pipe_fds[2];
  if (pipe2(pipe_fds, O_CLOEXEC) != 0) Die("pipe");
  pid_ = fork();
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(pipe_fds[1], 2);
    execv(binary.c_str(), argv.data());
    _exit(127);
  }
  close(pipe_fds[1]);
  // Its log goes through the pipe until it is ready, and then nowhere.
  FILE* log = fdopen(pipe_fds[0], "r");
  std::string text;
  char line[512];
  while (std::fgets(line, sizeof(line), log) != nullptr) {
    text += line;
    if (text.find("ready at") != std::string::npos) return;  // the pipe stays open for its log
  }
  Die("the daemon did not start: " + text);
}

BenchDaemon::~BenchDaemon() {
  kill(pid_, SIGTERM);
  waitpid(pid_, nullptr, 0);
  if (mounted_) umount2(state_.c_str(), MNT_DETACH);
  std::error_code ignored;
  std::filesystem::remove_all(state_, ignored);
  std::filesystem::remove_all(directory_, ignored);
}

struct DoorbellProbe::Raw {
  explicit Raw(const std::string& socket) : session(socket) {}
  test::RawSession session;
  uint64_t published = 0;
};

DoorbellProbe::DoorbellProbe(const std::string& socket, bool spin)
    : raw_(new Raw(socket)), spin_(spin) {
  raw_->session.Start("doorbell", 32, 0, 1);
  raw_->published = 1;  // the upload
  if (!raw_->session.AwaitReleased(1)) Die("the doorbell job did not start");
}

DoorbellProbe::~DoorbellProbe() { raw_->session.Delete(); }

double DoorbellProbe::RoundTripSeconds() {
  // The first is summed, the others are duplicates, acknowledged the same way.
  const contract::Descriptor d = raw_->session.Gradient();
  if (!spin_) {
    // Until the daemon says that it sleeps: that is what is measured.
    while (raw_->session.board()->daemon_sleeps.load() == 0) _mm_pause();
  }
  const double start = Now();
  if (spin_) {
    raw_->session.PublishIfAwake(d);
  } else {
    raw_->session.Publish(d);
  }
  const uint64_t count = ++raw_->published;
  while (raw_->session.released() < count) _mm_pause();
  return Now() - start;
}

}  // namespace shardd::bench
