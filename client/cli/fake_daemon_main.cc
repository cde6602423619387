// A process that answers on the attach socket --listen.socket=PATH as a daemon does.
// Writes its flags and "pid N" to PATH.flags, and "ended" there on SIGTERM.
#include <signal.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "client/cli/fake_daemon.h"
#include "proto/contract/version.h"

int main(int argc, char** argv) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigprocmask(SIG_BLOCK, &set, nullptr);
  std::string socket;
  std::string flags;
  for (int i = 1; i < argc; ++i) {
    std::string argument = argv[i];
    flags += argument + "\n";
    if (argument.rfind("--listen.socket=", 0) == 0) socket = argument.substr(16);
  }
  std::ofstream(socket + ".flags") << flags << "pid " << getpid() << "\n";
  shardd::cli::FakeAttachServer server(socket,
                                       shardd::cli::HelloAnswer(shardd::contract::kVersion));
  int signal;
  sigwait(&set, &signal);
  std::ofstream(socket + ".flags", std::ios::app) << "ended\n";
  return 0;
}
