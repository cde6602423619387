// A process of its own that attaches and opens a job with one parameter, as another user if
// it is told so. A test must not fork one itself: gRPC does not survive a fork.
//
//   raw_open SOCKET JOB ELEMENTS UID GID die|stay
// With "die" it ends by SIGKILL when the job is open; otherwise with 0, or 1 when it was refused.
#include <grp.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/support/raw_session.h"

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  const auto uid = static_cast<uid_t>(std::atoi(argv[4]));
  const auto gid = static_cast<gid_t>(std::atoi(argv[5]));
  if (uid != geteuid() && (setgroups(0, nullptr) != 0 || setresgid(gid, gid, gid) != 0 ||
                           setresuid(uid, uid, uid) != 0)) {
    std::perror("raw_open: cannot change the user");
    return 2;
  }
  shardd::test::RawSession raw(argv[1]);
  const grpc::Status status =
      raw.Open(raw.MakeOpen(argv[2], std::strtoull(argv[3], nullptr, 10), 0, 1));
  if (!status.ok()) {
    std::fprintf(stderr, "raw_open: %s\n", status.error_message().c_str());
    return 1;
  }
  if (std::string(argv[6]) == "die") kill(getpid(), SIGKILL);
  return 0;
}
