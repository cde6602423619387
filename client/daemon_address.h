// Finding the daemon: the given address, else the system's socket, else (one rank
// only) a private daemon that is started here.
#ifndef SHARDD_CLIENT_DAEMON_ADDRESS_H_
#define SHARDD_CLIENT_DAEMON_ADDRESS_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/attach_connection.h"
#include "client/client.h"

namespace shardd {

struct FoundDaemon {
  std::string socket_path;
  std::unique_ptr<AttachConnection> attach;
  std::string private_directory;  // of a private daemon; empty: it is not ours to end
};

// Where to look; tests put other paths in.
struct DaemonPlaces {
  std::string system_socket = "/run/shardd/shardd.sock";
  std::string private_sockets = "/tmp";     // a directory of the user is made in it
  std::string private_states = "/dev/shm";  // likewise; must be a tmpfs
};

// Attaches. InvalidArgument: an address that is none. FailedPrecondition: several ranks
// and no daemon (never one each: they would train as many models), or a private
// daemon of another version than this library.
absl::StatusOr<FoundDaemon> FindDaemon(const SessionOptions& options, const std::string& job,
                                       const DaemonPlaces& places = {});

// Attaches again where `before` was, whose process may have died; the system's socket or the given
// address is not left for another. A private daemon that does not run is started, and has until
// `deadline` to answer. Does not wait for a socket: Unavailable, nobody answers there now.
absl::StatusOr<FoundDaemon> FindDaemonAgain(const FoundDaemon& before,
                                            const SessionOptions& options, const std::string& job,
                                            absl::Time deadline, const DaemonPlaces& places = {});

}  // namespace shardd

#endif  // SHARDD_CLIENT_DAEMON_ADDRESS_H_
