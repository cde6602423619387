// What a session is made of, once it is open and before its rank group has formed.
#ifndef SHARDD_CLIENT_SESSION_PARTS_H_
#define SHARDD_CLIENT_SESSION_PARTS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/attach_connection.h"
#include "client/client.h"
#include "client/control_channel.h"
#include "client/grad_staging.h"
#include "client/memory_file.h"
#include "client/ring_writer.h"
#include "client/weights_segment.h"
#include "proto/contract/layout.h"

namespace shardd {

struct SessionParts {
  SessionOptions options;
  JobOptions job;
  std::string private_directory;  // of an embedded daemon; else empty
  bool created = false;           // by this Open
  uint64_t job_tag = 0;
  uint64_t committed_step = 0;  // at Open
  std::unique_ptr<const contract::Layout> layout;
  std::unique_ptr<AttachConnection> attach;
  std::unique_ptr<ControlChannel> control;
  std::unique_ptr<GradStaging> staging;
  std::unique_ptr<RingWriter> ring;
  std::unique_ptr<WeightsSegment> segment;
  ReadOnlyMapping window;
};

// Finds the daemon, opens the job, builds the ring and maps what the daemon shares.
absl::StatusOr<SessionParts> OpenParts(const SessionOptions& options, const JobOptions& job,
                                       const std::vector<ParameterSpec>& parameters);

}  // namespace shardd

#endif  // SHARDD_CLIENT_SESSION_PARTS_H_
