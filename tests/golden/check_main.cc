// check_golden FILE...: checks golden files through a daemon that it starts (the
// script tests/golden/check builds and runs it).
//
// Exit code: 0 all pass; 1 some file fails or cannot be checked; 2 wrong usage.
#include <cstdio>
#include <string>
#include <vector>

#include "tests/golden/check_file.h"
#include "tests/support/daemon_process.h"

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: check FILE...\n");
    return 2;
  }
  shardd::test::DaemonProcess daemon;
  int failed = 0;
  for (int i = 1; i < argc; ++i) {
    std::vector<std::string> jobs;
    const shardd::golden::FileReport report = shardd::golden::CheckFile(
        daemon.socket(), argv[i], "golden-" + std::to_string(i) + "-", &jobs);
    std::fputs(report.Text(argv[i]).c_str(), stdout);
    std::fflush(stdout);
    failed += report.status.ok() ? 0 : 1;
    for (const std::string& job : jobs) {
      if (daemon.HasJob(job)) daemon.DeleteJob(job, /*force=*/true);
    }
  }
  std::printf("%d passed, %d failed\n", argc - 1 - failed, failed);
  return failed == 0 ? 0 : 1;
}
