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

// When what ends again and again may be started again.
class Restarts {
 public:
  Restarts(const Backoff& backoff, absl::Duration settled) : backoff_(backoff), settled_(settled) {}

  void Started(absl::Time now) { started_ = now; }
  // It has ended; returns the pause before its restart.
  absl::Duration Ended(absl::Time now) {
    quick_ = now - started_ >= settled_ ? 0 : quick_ + 1;
    return backoff_.Before(quick_ == 0 ? 0 : quick_ - 1);
  }

 private:
  Backoff backoff_;
  absl::Duration settled_;
  absl::Time started_;
  uint32_t quick_ = 0;  // ends in a row that came soon
};

class Group {
 public:
  Group(const LaunchOptions& options, std::string program)
      : options_(options),
        program_(std::move(program)),
        daemon_pidfd_(options.daemon_pidfd),
        daemon_restarts_(options.backoff, options.settled) {
    result_.ranks.resize(options.ranks);
    for (uint32_t rank = 0; rank < options.ranks; ++rank) ranks_.emplace_back(options);
    daemon_restarts_.Started(absl::Now());
  }

  absl::StatusOr<LaunchResult> Run();

 private:
  struct Rank {
    explicit Rank(const LaunchOptions& options) : restarts(options.backoff, options.settled) {}
    // Neither this nor a start to come: ended for good.
    std::optional<RankProcess> process;
    absl::Time start_at = absl::InfiniteFuture();
    Restarts restarts;
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
  // Nothing is started any more.
  void Stop();
  void StartDue();
  void MindDaemon();
  void ReapAll();
  void OnEnd(uint32_t rank, int exit_code);
  void Wait();
  bool Running() const;

  const LaunchOptions& options_;
  const std::string program_;
  SignalWatch signals_;
  std::vector<Rank> ranks_;
  LaunchResult result_;
  int daemon_pidfd_;              // -1: not minded, or to be restarted
  contract::UniqueFd own_pidfd_;  // of a daemon that was restarted
  Restarts daemon_restarts_;
  absl::Time daemon_restart_at_ = absl::InfiniteFuture();
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
  ranks_[rank].process.emplace(std::move(*process));
  ranks_[rank].restarts.Started(absl::Now());
  return absl::OkStatus();
}

bool Group::Running() const {
  for (const Rank& rank : ranks_) {
    if (rank.process || rank.start_at != absl::InfiniteFuture()) return true;
  }
  return false;
}

void Group::SignalAll(int signal) {
  for (const Rank& rank : ranks_) {
    if (rank.process) rank.process->Signal(signal);
  }
}

void Group::Stop() {
  stopping_ = true;
  daemon_pidfd_ = -1;
  daemon_restart_at_ = absl::InfiniteFuture();
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_[rank].start_at == absl::InfiniteFuture()) continue;
    ranks_[rank].start_at = absl::InfiniteFuture();
    if (result_.exit_code == 0) result_.exit_code = result_.ranks[rank].exit_code;
  }
}

void Group::Forward(int signal) {
  if (stopping_) {
    Note("killing all ranks");
    SignalAll(SIGKILL);
    return;
  }
  Note(absl::StrCat("signal ", signal, " (", strsignal(signal), ") goes to all ranks"));
  Stop();
  SignalAll(signal);
}

void Group::Fail(uint32_t rank, int exit_code) {
  if (result_.exit_code == 0) result_.exit_code = exit_code;
  if (stopping_) return;
  Stop();
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
  const absl::Time now = absl::Now();
  const absl::Duration pause = ranks_[rank].restarts.Ended(now);
  ranks_[rank].start_at = now + pause;
  Note(absl::StrCat(
      text, ": starting it again (", result.restarts, " of ", options_.max_restarts, ")",
      pause > absl::ZeroDuration() ? absl::StrCat(" after ", absl::FormatDuration(pause)) : ""));
}

void Group::StartDue() {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (absl::Now() < ranks_[rank].start_at) continue;
    ranks_[rank].start_at = absl::InfiniteFuture();
    if (absl::Status started = Start(rank); !started.ok()) {
      Note(std::string(started.message()));
      Fail(rank, result_.ranks[rank].exit_code);
    }
  }
}

void Group::MindDaemon() {
  pollfd ended{daemon_pidfd_, POLLIN, 0};
  if (daemon_pidfd_ >= 0 && poll(&ended, 1, 0) == 1) {
    daemon_pidfd_ = -1;
    const absl::Duration pause = daemon_restarts_.Ended(absl::Now());
    daemon_restart_at_ = absl::Now() + pause;
    Note("the daemon has ended: starting another in its place");
  }
  if (absl::Now() < daemon_restart_at_) return;
  daemon_restart_at_ = absl::InfiniteFuture();
  absl::StatusOr<contract::UniqueFd> pidfd = options_.restart_daemon();
  daemon_restarts_.Started(absl::Now());
  if (pidfd.ok()) {
    own_pidfd_ = *std::move(pidfd);
    daemon_pidfd_ = own_pidfd_.get();
    return;
  }
  const absl::Duration pause = daemon_restarts_.Ended(absl::Now());
  Note(absl::StrCat(pidfd.status().message(), "; trying again in ", absl::FormatDuration(pause)));
  daemon_restart_at_ = absl::Now() + pause;
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
  if (daemon_pidfd_ >= 0) polled.push_back({daemon_pidfd_, POLLIN, 0});
  absl::Time next = std::min(kill_at_, daemon_restart_at_);
  for (const Rank& rank : ranks_) next = std::min(next, rank.start_at);
  int timeout = -1;
  if (next != absl::InfiniteFuture()) {
    timeout = static_cast<int>(
        absl::ToInt64Milliseconds(std::max(absl::ZeroDuration(), next - absl::Now())) + 1);
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
    MindDaemon();
    StartDue();
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
