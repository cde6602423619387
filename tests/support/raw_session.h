// A client that keeps no rules: the protocol by hand, for tests of what a hostile or
// broken worker can do.
#ifndef SHARDD_TESTS_SUPPORT_RAW_SESSION_H_
#define SHARDD_TESTS_SUPPORT_RAW_SESSION_H_

#include <memory>
#include <string>

#include "proto/contract/attach.h"
#include "proto/contract/fd_passing.h"
#include "proto/contract/segments.h"
#include "proto/control.grpc.pb.h"

namespace shardd::test {

class RawSession {
 public:
  // Attaches. Aborts the test's process when that fails.
  explicit RawSession(const std::string& socket);
  ~RawSession();
  RawSession(const RawSession&) = delete;

  const std::string& token() const { return token_; }
  int socket() const { return attach_.get(); }
  v1::Control::Stub* control() { return control_.get(); }

  // A request for a job of one fp32 parameter 'w' of `elements`, one slot per rank.
  v1::OpenRequest MakeOpen(const std::string& job, uint64_t elements, uint32_t rank,
                           uint32_t world_size) const;
  grpc::Status Open(const v1::OpenRequest& request);
  const v1::OpenReply& open_reply() const { return open_; }
  // Makes a ring of `data_bytes`, sealed with `seals`, and sends it. False: refused; the daemon's
  // text is then error().
  bool AttachRing(uint64_t data_bytes, int seals);
  bool AttachRing(uint64_t data_bytes);
  grpc::Status Join(v1::JoinReply* reply);
  // A right EndStep of the step that the group is at.
  v1::EndStepRequest MakeEndStep() const;
  grpc::Status EndStep(const v1::EndStepRequest& request);
  grpc::Status Close();
  // Open, ring, Join, the upload of zeros by rank 0.
  void Start(const std::string& job, uint64_t elements, uint32_t rank, uint32_t world_size);

  // Deletes its own job, with whatever is attached.
  void Delete() { DeleteJob(request_.config().name()); }
  // Deletes all jobs that there are but one.
  void DeleteAllJobsBut(const std::string& name);

  // A right descriptor of the whole of bucket 0 for the next step.
  contract::Descriptor Gradient() const;
  // Puts it into the ring as it is, and rings.
  void Publish(const contract::Descriptor& descriptor);
  // As a client does: rings only when the daemon says that it sleeps.
  void PublishIfAwake(const contract::Descriptor& descriptor);
  // How many the daemon is done with.
  uint64_t released() const { return line()->released.load(std::memory_order_acquire); }
  // Waits until the daemon has released `count` descriptors, or refused the session (false).
  bool AwaitReleased(uint64_t count);
  // Waits until the board's line says that this session is refused.
  bool AwaitRefused();
  // Waits until `step` is decided.
  bool AwaitCommitted(uint64_t step);
  // What SessionError tells: why this session was refused, or what it waits for.
  std::string Refusal();

  contract::RingHeader* ring() { return reinterpret_cast<contract::RingHeader*>(ring_); }
  std::byte* ring_base() { return ring_; }
  uint64_t ring_bytes() const { return ring_bytes_; }
  uint64_t data_offset() const { return data_offset_; }
  int ring_fd() const { return ring_fd_.get(); }
  int weights_fd() const { return weights_fd_.get(); }
  const contract::Board* board() const;
  const std::string& error() const { return error_; }
  const v1::JoinReply& joined() const { return joined_; }

 private:
  const contract::SessionLine* line() const;
  void Put(const contract::Descriptor& descriptor);
  void Ring();
  void DeleteJob(const std::string& name);

  contract::UniqueFd attach_;
  std::string token_;
  std::unique_ptr<v1::Control::Stub> control_;
  std::unique_ptr<v1::Admin::Stub> admin_;
  v1::OpenRequest request_;
  v1::OpenReply open_;
  v1::JoinReply joined_;
  contract::UniqueFd ring_fd_, weights_fd_, window_fd_;
  std::byte* ring_ = nullptr;
  uint64_t ring_bytes_ = 0;
  uint64_t data_offset_ = 0;
  const std::byte* weights_ = nullptr;
  uint64_t weights_bytes_ = 0;
  std::string error_;
};

}  // namespace shardd::test

#endif  // SHARDD_TESTS_SUPPORT_RAW_SESSION_H_
