#include "server/env/fault_guard.h"

#include <setjmp.h>
#include <signal.h>

#include <cstdlib>

namespace shardd::env {

namespace {

thread_local sigjmp_buf* t_jump = nullptr;
thread_local const void* volatile t_address = nullptr;

void OnSigbus(int signal, siginfo_t* info, void*) {
  if (t_jump == nullptr) {
    // Not ours: let the default action report it where it happened.
    struct sigaction action {};
    action.sa_handler = SIG_DFL;
    sigaction(signal, &action, nullptr);
    return;
  }
  t_address = info->si_addr;
  siglongjmp(*t_jump, 1);
}

}  // namespace

void InstallFaultHandler() {
  struct sigaction action {};
  action.sa_sigaction = OnSigbus;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGBUS, &action, nullptr);
}

const void* RunGuarded(const std::function<void()>& fn) {
  sigjmp_buf jump;
  // No signal mask is saved: SA_NODEFER leaves SIGBUS unblocked.
  if (sigsetjmp(jump, 0) != 0) {
    t_jump = nullptr;
    return t_address;
  }
  t_jump = &jump;
  fn();
  t_jump = nullptr;
  return nullptr;
}

}  // namespace shardd::env
