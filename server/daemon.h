// The daemon, wired: what main starts and ends, and what tests run in process.
#ifndef SHARDD_SERVER_DAEMON_H_
#define SHARDD_SERVER_DAEMON_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/daemon_config.pb.h"
#include "server/store/descriptor_store.h"

namespace shardd {

struct DaemonOptions {
  v1::DaemonConfig config;  // complete and valid: see server/config
  std::function<void(const std::string&)> log;
  // The daemon was drained and is to be destroyed; called once, from any thread.
  std::function<void()> on_drained;
  // The service manager's descriptor store, if there is one.
  store::DescriptorStore::Options descriptors;
};

class Daemon {
 public:
  // Takes the state directory and listens. The errors say what to change.
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(DaemonOptions options);
  // Stops in good order: calls in flight are answered or cancelled, a step that is
  // decided is finished, jobs' state stays in the state directory.
  virtual ~Daemon() = default;

  virtual const std::string& socket() const = 0;
  // Spills what nobody has used for `idle`. Returns at once.
  virtual void SpillIdle(absl::Duration idle) = 0;
  // For how long no session has been attached; zero while there is one.
  virtual absl::Duration IdleTime() = 0;
};

}  // namespace shardd

#endif  // SHARDD_SERVER_DAEMON_H_
