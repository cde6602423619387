// Survives SIGBUS on memory that a client shares.
#ifndef SHARDD_SERVER_ENV_FAULT_GUARD_H_
#define SHARDD_SERVER_ENV_FAULT_GUARD_H_

#include <functional>

namespace shardd::env {

// Installs the SIGBUS handler. Once per process, before any thread reads a ring.
void InstallFaultHandler();

// Runs fn; if reading a client's memory raises SIGBUS inside it, abandons fn at
// that instruction and returns the address. Returns null when fn returned.
// fn must own nothing that a destructor would release (it is left by longjmp).
// Not reentrant on a thread. A SIGBUS outside of any guard ends the process as ever.
const void* RunGuarded(const std::function<void()>& fn);

}  // namespace shardd::env

#endif  // SHARDD_SERVER_ENV_FAULT_GUARD_H_
