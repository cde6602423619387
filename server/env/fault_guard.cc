#include "server/env/fault_guard.h"

#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include <cstdlib>

namespace shardd::env {

namespace {

thread_local sigjmp_buf* t_jump = nullptr;
thread_local const void* volatile t_address = nullptr;

void OnSigbus(int signal, siginfo_t* info, void* context) {
  if (t_jump == nullptr) {
    // Not ours: let the default action report it where it happened.
    struct sigaction action {};
    action.sa_handler = SIG_DFL;
    sigaction(signal, &action, nullptr);
    return;
  }
  t_address = info->si_addr;
  // What siglongjmp does not restore. Not SA_NODEFER instead: ThreadSanitizer blocks all
  // signals while a handler runs, and a thread's second fault would be fatal.
  pthread_sigmask(SIG_SETMASK, &static_cast<ucontext_t*>(context)->uc_sigmask, nullptr);
  siglongjmp(*t_jump, 1);
}

}  // namespace

void InstallFaultHandler() {
  struct sigaction action {};
  action.sa_sigaction = OnSigbus;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGBUS, &action, nullptr);
}

const void* RunGuarded(const std::function<void()>& fn) {
  sigjmp_buf jump;
  // No signal mask is saved, which would be a system call each time: the handler restores it.
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
