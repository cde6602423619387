// What a session is made of, once it is open and before its rank group has formed.
#ifndef SHARDD_CLIENT_SESSION_PARTS_H_
#define SHARDD_CLIENT_SESSION_PARTS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/attach_connection.h"
#include "client/client.h"
#include "client/control_channel.h"
#include "client/daemon_address.h"
#include "client/grad_staging.h"
#include "client/memory_file.h"
#include "client/ring_writer.h"
#include "client/weights_segment.h"
#include "proto/contract/layout.h"

namespace shardd {

// What a session has from one daemon process. The process that takes its place gives another
// link to the same job; layout, staging and ring stay.
struct DaemonLink {
  FoundDaemon found;
  std::unique_ptr<ControlChannel> control;
  v1::OpenReply job;  // the daemon's answer to Open
  std::unique_ptr<WeightsSegment> segment;
  ReadOnlyMapping window;

  const AttachConnection& attach() const { return *found.attach; }
};

struct SessionParts {
  SessionOptions options;
  JobOptions job;
  v1::OpenRequest request;  // what Open sent; sent again to another daemon
  std::unique_ptr<const contract::Layout> layout;
  std::unique_ptr<GradStaging> staging;
  std::unique_ptr<RingWriter> ring;
  DaemonLink daemon;
};

// Finds the daemon, opens the job, builds the ring and maps what the daemon shares.
absl::StatusOr<SessionParts> OpenParts(const SessionOptions& options, const JobOptions& job,
                                       const std::vector<ParameterSpec>& parameters);

// One attempt to attach to the daemon that listens where parts.daemon did (a private one is
// started again) and to open the job there for the same rank. The ring is restarted: nothing may
// be published before the new link is in use. `deadline` is for a private daemon's start and for
// one that does not answer.
//   has_state: the job had all of its weights. It must be there then, with the same id and
//   timeline, else FailedPrecondition; without it a new one is as good.
//   Unavailable, DeadlineExceeded, Cancelled or Unauthenticated: it may come later.
absl::StatusOr<DaemonLink> Reopen(const SessionParts& parts, bool has_state, absl::Time deadline);

}  // namespace shardd

#endif  // SHARDD_CLIENT_SESSION_PARTS_H_
