// A daemon process of a benchmark, on a tmpfs with huge pages where one can be mounted.
#ifndef SHARDD_BENCH_BENCH_DAEMON_H_
#define SHARDD_BENCH_BENCH_DAEMON_H_

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "client/client.h"

namespace shardd::bench {

class BenchDaemon {
 public:
  // `binary`: path of shardd. Ends the process when it cannot be started.
  BenchDaemon(const std::string& binary, std::vector<std::string> flags);
  ~BenchDaemon();
  BenchDaemon(const BenchDaemon&) = delete;
  const std::string& socket() const { return socket_; }
  bool huge_pages() const { return mounted_; }
  pid_t pid() const { return pid_; }

 private:
  std::string directory_;  // of the socket
  std::string state_;
  std::string socket_;
  bool mounted_ = false;
  pid_t pid_ = -1;
};

// Publishes one small bucket at a time and waits for its ring space to come back: there
// and back through ring, doorbell and board.
class DoorbellProbe {
 public:
  // spin: look at the board without sleeping, as a client does at first.
  DoorbellProbe(const std::string& socket, bool spin);
  ~DoorbellProbe();
  double RoundTripSeconds();

 private:
  struct Raw;
  std::unique_ptr<Raw> raw_;
  bool spin_;
};

}  // namespace shardd::bench

#endif  // SHARDD_BENCH_BENCH_DAEMON_H_
