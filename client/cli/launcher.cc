#include "client/cli/launcher.h"

#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cli/rank_process.h"
#include "proto/contract/fd_passing.h"

namespace shardd::cli {

namespace {

// Blocks the signals that the loop reads from a descriptor, while it lives.
class SignalWatch {
 public:
  SignalWatch() {
    // Where a parent has it ignored, ended children would leave no exit code.
    signal(SIGCHLD, SIG_DFL);
    sigset_t set;
    sigemptyset(&set);
    for (int signal : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&set, signal);
    sigprocmask(SIG_BLOCK, &set, &before_);
    fd_.Reset(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  }
  ~SignalWatch() { sigprocmask(SIG_SETMASK, &before_, nullptr); }
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

  int fd() const { return fd_.get(); }
  // The next one that came; nullopt: none.
  std::optional<int> Next() {
    signalfd_siginfo info;
    if (read(fd_.get(), &info, sizeof(info)) != sizeof(info)) return std::nullopt;
    return static_cast<int>(info.ssi_signo);
  }

 private:
  sigset_t before_;
  contract::UniqueFd fd_;
};

std::string Describe(int exit_code) {
  if (exit_code <= 128) return absl::StrCat("ended with exit code ", exit_code);
  return absl::StrCat("was killed by signal ", exit_code - 128, " (", strsignal(exit_code - 128),
                      ")");
}

class Group {
 public:
  Group(const LaunchOptions& options, std::string program)
      : options_(options), program_(std::move(program)), ranks_(options.ranks) {
    result_.ranks.resize(options.ranks);
  }

  absl::StatusOr<LaunchResult> Run();

 private:
  struct Rank {
    std::optional<RankProcess> process;  // nullopt: ended for good
  };

  absl::Status Start(uint32_t rank);
  std::vector<std::string> Environment(uint32_t rank) const;
  void Note(const std::string& text) const {
    if (options_.on_note) options_.on_note(text);
  }
  LineReader::Sink Sink(uint32_t rank, Stream stream) const {
    return [this, rank, stream](std::string_view line) {
      if (options_.on_line) options_.on_line(rank, stream, line);
    };
  }
  void SignalAll(int signal);
  void Forward(int signal);
  // Ends the others after `rank` failed for good.
  void Fail(uint32_t rank, int exit_code);
  void ReapAll();
  void OnEnd(uint32_t rank, int exit_code);
  void Wait();
  bool Running() const;

  const LaunchOptions& options_;
  const std::string program_;
  SignalWatch signals_;
  std::vector<Rank> ranks_;
  LaunchResult result_;
  bool stopping_ = false;  // nothing is restarted any more
  absl::Time kill_at_ = absl::InfiniteFuture();
};

std::vector<std::string> Group::Environment(uint32_t rank) const {
  static constexpr const char* kOurs[] = {
      "RANK=", "LOCAL_RANK=", "WORLD_SIZE=", "SHARDD_ADDRESS=", "SHARDD_RESTART_COUNT="};
  std::vector<std::string> environment;
  for (const std::string& variable : options_.environment) {
    bool ours = false;
    for (const char* name : kOurs) ours = ours || absl::StartsWith(variable, name);
    if (!ours) environment.push_back(variable);
  }
  environment.push_back(absl::StrCat("RANK=", rank));
  environment.push_back(absl::StrCat("LOCAL_RANK=", rank));
  environment.push_back(absl::StrCat("WORLD_SIZE=", options_.ranks));
  environment.push_back(absl::StrCat("SHARDD_ADDRESS=", options_.address));
  environment.push_back(absl::StrCat("SHARDD_RESTART_COUNT=", result_.ranks[rank].restarts));
  return environment;
}

absl::Status Group::Start(uint32_t rank) {
  absl::StatusOr<RankProcess> process =
      RankProcess::Start(program_, options_.command, Environment(rank));
  if (!process.ok()) return process.status();
  ranks_[rank].process = std::move(*process);
  return absl::OkStatus();
}

bool Group::Running() const {
  for (const Rank& rank : ranks_) {
    if (rank.process) return true;
  }
  return false;
}

void Group::SignalAll(int signal) {
  for (const Rank& rank : ranks_) {
    if (rank.process) rank.process->Signal(signal);
  }
}

void Group::Forward(int signal) {
  if (stopping_) {
    Note("killing all ranks");
    SignalAll(SIGKILL);
    return;
  }
  Note(absl::StrCat("signal ", signal, " (", strsignal(signal), ") goes to all ranks"));
  stopping_ = true;
  SignalAll(signal);
}

void Group::Fail(uint32_t rank, int exit_code) {
  if (result_.exit_code == 0) result_.exit_code = exit_code;
  if (stopping_) return;
  stopping_ = true;
  if (!Running()) return;
  Note(absl::StrCat("rank ", rank, " has failed: ending the others"));
  SignalAll(SIGTERM);
  kill_at_ = absl::Now() + options_.grace;
}

void Group::OnEnd(uint32_t rank, int exit_code) {
  RankProcess& process = *ranks_[rank].process;
  process.out().Finish(Sink(rank, Stream::kOut));
  process.err().Finish(Sink(rank, Stream::kErr));
  ranks_[rank].process.reset();
  RankResult& result = result_.ranks[rank];
  result.exit_code = exit_code;
  if (exit_code == 0) return;
  std::string text = absl::StrCat("rank ", rank, " ", Describe(exit_code));
  if (stopping_ || result.restarts == options_.max_restarts) {
    Note(text);
    Fail(rank, exit_code);
    return;
  }
  ++result.restarts;
  Note(absl::StrCat(text, ": starting it again (", result.restarts, " of ", options_.max_restarts,
                    ")"));
  absl::Status ready = options_.before_restart ? options_.before_restart() : absl::OkStatus();
  if (ready.ok()) ready = Start(rank);
  if (!ready.ok()) {
    Note(std::string(ready.message()));
    Fail(rank, exit_code);
  }
}

void Group::ReapAll() {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!ranks_[rank].process) continue;
    std::optional<int> exit_code = ranks_[rank].process->Reap();
    if (exit_code) OnEnd(rank, *exit_code);
  }
}

void Group::Wait() {
  std::vector<pollfd> polled = {{signals_.fd(), POLLIN, 0}};
  for (Rank& rank : ranks_) {
    if (!rank.process) continue;
    polled.push_back({rank.process->pidfd(), POLLIN, 0});
    for (LineReader* reader : {&rank.process->out(), &rank.process->err()}) {
      if (reader->fd() >= 0) polled.push_back({reader->fd(), POLLIN, 0});
    }
  }
  int timeout = -1;
  if (kill_at_ != absl::InfiniteFuture()) {
    timeout = static_cast<int>(
        absl::ToInt64Milliseconds(std::max(absl::ZeroDuration(), kill_at_ - absl::Now())) + 1);
  }
  poll(polled.data(), polled.size(), timeout);
}

absl::StatusOr<LaunchResult> Group::Run() {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    absl::Status started = Start(rank);
    if (!started.ok()) {
      stopping_ = true;
      SignalAll(SIGKILL);
      while (Running()) {
        ReapAll();
        if (Running()) Wait();
      }
      return started;
    }
  }
  while (Running()) {
    Wait();
    while (std::optional<int> signal = signals_.Next()) Forward(*signal);
    for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      if (!ranks_[rank].process) continue;
      ranks_[rank].process->out().Read(Sink(rank, Stream::kOut));
      ranks_[rank].process->err().Read(Sink(rank, Stream::kErr));
    }
    ReapAll();
    if (absl::Now() >= kill_at_) {
      Note("killing the ranks that did not end");
      SignalAll(SIGKILL);
      kill_at_ = absl::InfiniteFuture();
    }
  }
  return result_;
}

}  // namespace

absl::StatusOr<LaunchResult> Launch(const LaunchOptions& options) {
  if (options.ranks == 0) return absl::InvalidArgumentError("--ranks must be at least 1, not 0");
  if (options.command.empty()) return absl::InvalidArgumentError("there is no command to run");
  absl::StatusOr<std::string> program = FindProgram(options.command[0], options.environment);
  if (!program.ok()) return program.status();
  return Group(options, *std::move(program)).Run();
}

}  // namespace shardd::cli
