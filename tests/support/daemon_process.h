// A real daemon process for a test, with directories of its own that go with it.
#ifndef SHARDD_TESTS_SUPPORT_DAEMON_PROCESS_H_
#define SHARDD_TESTS_SUPPORT_DAEMON_PROCESS_H_

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "proto/contract/fd_passing.h"
#include "proto/control.grpc.pb.h"
#include "tests/support/temp_dir.h"

namespace shardd::test {

// The path of a file that the test has as data ("server/shardd").
std::string Runfile(const std::string& path);

class DaemonProcess {
 public:
  struct Options {
    std::vector<std::string> flags;  // besides socket, directory and failpoints
    std::string state_directory;     // empty: one in /dev/shm
    std::string socket;              // empty: in a directory of its own
    mode_t umask = 022;
    // Runs in the child before exec: rlimits, ids.
    void (*before_exec)() = nullptr;
  };

  // Starts it and waits until it listens. Aborts the test's process if it does not.
  explicit DaemonProcess(Options options);
  DaemonProcess() : DaemonProcess(Options()) {}
  // Ends it with SIGTERM and expects exit 0.
  ~DaemonProcess();

  const std::string& socket() const { return socket_; }
  const std::string& state_directory() const { return state_directory_; }
  pid_t pid() const { return pid_; }
  // What it has written to stderr so far.
  std::string Log() const;
  // Waits until the log contains `text`; false after 30 seconds.
  bool AwaitLog(const std::string& text) const;
  // SIGTERM and wait; returns the exit status as waitpid gives it. Once.
  int Stop();
  // Waits for an end that the test has brought about; the status as waitpid gives it. Once.
  int AwaitDeath();
  bool Alive() const;

  // Admin calls with a token of this process's own.
  v1::ServerInfoReply Info();
  // Whether it answers in time.
  bool AnswersWithin(double seconds);
  v1::JobStatus Job(const std::string& name);
  bool HasJob(const std::string& name);
  void ArmFailpoint(const std::string& name, const std::string& action, uint32_t skip = 0);
  // Waits until a thread is held there.
  void AwaitFailpoint(const std::string& name);
  void ReleaseFailpoint(const std::string& name);
  grpc::Status HandOver(const std::string& job, const std::string& to);
  // Ends with the daemon's answer; its process then ends by itself.
  v1::DrainReply Drain(double deadline_seconds);
  grpc::Status DeleteJob(const std::string& name, bool force);

 private:
  TempDir dir_{"/tmp"};
  std::unique_ptr<TempDir> own_state_;
  std::string socket_;
  std::string state_directory_;
  std::string log_path_;
  pid_t pid_ = -1;
  contract::UniqueFd attach_;
  std::string token_;
  std::unique_ptr<v1::Admin::Stub> admin_;
};

}  // namespace shardd::test

#endif  // SHARDD_TESTS_SUPPORT_DAEMON_PROCESS_H_
