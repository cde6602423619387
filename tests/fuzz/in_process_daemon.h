// A daemon inside the fuzzer's own process, so that coverage and sanitizers see it, with a
// small budget and another trainer's job that must not notice anything.
#ifndef SHARDD_TESTS_FUZZ_IN_PROCESS_DAEMON_H_
#define SHARDD_TESTS_FUZZ_IN_PROCESS_DAEMON_H_

#include <memory>
#include <string>

#include "client/client.h"
#include "server/daemon.h"
#include "tests/support/temp_dir.h"

namespace shardd::test {

class InProcessDaemon {
 public:
  // Never destroyed: a fuzzer ends by exit().
  static InProcessDaemon& Get();

  const std::string& socket() const { return daemon_->socket(); }
  // The bystander takes a step; aborts if it cannot.
  void CheckBystander();

 private:
  InProcessDaemon();
  // At exit: the daemon itself, and what it has mapped, goes with the process.
  void RemoveDirectories();
  TempDir dir_{"/tmp"};
  TempDir state_{"/dev/shm"};
  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<Session> bystander_;
};

}  // namespace shardd::test

#endif  // SHARDD_TESTS_FUZZ_IN_PROCESS_DAEMON_H_
