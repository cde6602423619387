// Stands in for the daemon's binary where a client starts one: takes the flags that
// the client gives it, serves a fake daemon, and ends on SIGTERM.
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "client/fake_daemon.h"
#include "proto/contract/version.h"

int main(int argc, char** argv) {
  std::string socket, store, version = shardd::contract::kVersion;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag.starts_with("--listen.socket=")) socket = flag.substr(strlen("--listen.socket="));
    if (flag.starts_with("--store.directory=")) store = flag.substr(strlen("--store.directory="));
  }
  // A job whose name says so wants a daemon that does not start, or is too old.
  if (store.ends_with("broken")) {
    std::fprintf(stderr, "cannot use %s: no space\n", store.c_str());
    return 3;
  }
  if (store.ends_with("old")) version = "0.0.0";
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigprocmask(SIG_BLOCK, &set, nullptr);
  shardd::FakeDaemon daemon(socket, version);
  std::printf("up\n");
  std::fflush(stdout);
  int signal = 0;
  sigwait(&set, &signal);
  return 0;
}
