// A daemon for the client's own tests: real sockets, a real weights segment and rings,
// one job, plain gradient descent instead of an optimizer, and handles to make it
// misbehave. It trusts its clients.
#ifndef SHARDD_CLIENT_FAKE_DAEMON_H_
#define SHARDD_CLIENT_FAKE_DAEMON_H_

#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "client/memory_file.h"
#include "proto/contract/fd_passing.h"
#include "proto/contract/layout.h"
#include "proto/contract/segments.h"
#include "proto/contract/slot_tree.h"
#include "proto/control.grpc.pb.h"

namespace shardd {

class FakeDaemon final : public v1::Control::Service, public v1::Admin::Service {
 public:
  // Listens at `socket_path` (and ".attach") until destruction.
  explicit FakeDaemon(const std::string& socket_path, const std::string& version = "fake");
  ~FakeDaemon() override;

  // Ends what it listens on and all sessions, as a process that dies does.
  void Die();
  // After Die: listens again and has the job as it was, in a new generation.
  void ComeBack();
  // Between the two: its state directory is another one.
  void LoseJob();

  // --- what happened ---
  // Waits until the predicate, which runs under the daemon's lock, holds; false after
  // half a minute.
  bool WaitUntil(const std::function<bool()>& predicate);
  uint64_t committed_step() const { return committed_; }
  uint64_t generation() const { return generation_; }
  uint64_t groups() const { return groups_; }  // that formed
  size_t sessions() const { return sessions_.size(); }
  // Descriptors of a rank that were read.
  uint64_t consumed(uint32_t rank);
  // The tree sums of a step as a flat space; of steps that were decided.
  std::vector<float> Sum(uint64_t step);
  // EndStep calls that were accepted, of all ranks in order of arrival.
  std::vector<v1::EndStepRequest> EndSteps();
  const contract::Layout& layout() const { return *layout_; }
  uint64_t doorbells() const { return doorbells_; }

  // --- what shall happen ---
  void HoldRings(bool hold);      // rings are not read
  void HoldDecisions(bool hold);  // steps are not decided
  void NewGeneration();           // as after the death of a rank
  void FailJob(const std::string& reason);
  void Initialising(bool initialising);  // the board's state, whatever was uploaded
  void Refuse(uint32_t rank, const absl::Status& why);
  void HangUp(uint32_t rank);                // closes its attach socket
  void RefuseHello(const std::string& why);  // kError to every hello from now on
  void NextResult(v1::StepResult result, const std::string& reason);  // of the next decision
  // What Open, Join and EndStep answer instead, once; OK: nothing.
  void NextOpen(const absl::Status& status);
  void NextJoin(const absl::Status& status);
  void NextEndStep(const absl::Status& status);
  void WeightsReady(bool ready);  // whether decisions set the ready steps

 private:
  struct Peer {
    std::string token;
    uint64_t nonce = 0;
    contract::UniqueFd socket;
    std::thread thread;
    bool open = false;
    bool closed = false;
    uint32_t rank = 0;
    uint32_t line = 0;
    MemoryFile window;
    const std::byte* ring = nullptr;
    uint64_t ring_bytes = 0;
    uint64_t read = 0;
    std::vector<bool> done;  // [read] descriptors that may be released
    uint64_t released = 0;
    bool joining = false;
    bool joined = false;
    std::optional<v1::EndStepRequest> ended;
    absl::Status refusal;
  };
  struct Part {
    contract::Descriptor descriptor;
    Peer* peer = nullptr;
    uint64_t index = 0;
  };

  // gRPC.
  grpc::Status Open(grpc::ServerContext*, const v1::OpenRequest*, v1::OpenReply*) override;
  grpc::Status Join(grpc::ServerContext*, const v1::JoinRequest*, v1::JoinReply*) override;
  grpc::Status EndStep(grpc::ServerContext*, const v1::EndStepRequest*, v1::EndStepReply*) override;
  grpc::Status StepRecords(grpc::ServerContext*, const v1::StepRecordsRequest*,
                           v1::StepRecordsReply*) override;
  grpc::Status FillWindow(grpc::ServerContext*, const v1::FillWindowRequest*,
                          v1::FillWindowReply*) override;
  grpc::Status SessionError(grpc::ServerContext*, const v1::SessionErrorRequest*,
                            v1::SessionErrorReply*) override;
  grpc::Status Close(grpc::ServerContext*, const v1::CloseRequest*, v1::CloseReply*) override;
  grpc::Status ServerInfo(grpc::ServerContext*, const v1::ServerInfoRequest*,
                          v1::ServerInfoReply*) override;

  // All below with the lock held, but for the threads' own loops.
  void AcceptLoop();
  void ReadLoop(Peer* peer);
  bool OnMessage(Peer* peer);
  void MakeJob(const v1::OpenRequest& request);
  Peer* FindToken(const std::string& token);
  Peer* AtRank(uint32_t rank);
  void ReadRings();
  void OnDescriptor(Peer* peer, const contract::Descriptor& descriptor, uint64_t index);
  void OnGradient(Peer* peer, const contract::Descriptor& descriptor, uint64_t index);
  void OnInit(const Peer& peer, const contract::Descriptor& descriptor);
  void Fold(uint64_t bucket);
  void Release(Peer* peer, uint64_t index);
  void TryForm();
  void TryDecide();
  void PublishWeights();
  void BeginGeneration();
  void Wake();
  const std::byte* Data(const Peer& peer, const contract::Descriptor& descriptor) const;
  contract::Board& board() {
    return *reinterpret_cast<contract::Board*>(weights_.data() + contract::kSegmentPage);
  }
  contract::BucketLine& bucket_line(uint64_t bucket);
  contract::SessionLine& session_line(uint32_t line);

  const std::string version_;
  std::string socket_path_;
  contract::UniqueFd listener_;
  contract::UniqueFd stop_event_;
  std::unique_ptr<grpc::Server> server_;
  std::thread accept_thread_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Peer>> sessions_;
  uint64_t groups_ = 0;
  uint64_t nonces_ = 0;  // of sessions before the last death
  bool stop_ = false;
  bool hold_rings_ = false;
  bool hold_decisions_ = false;
  bool weights_ready_ = true;
  std::string hello_error_;
  absl::Status next_open_, next_join_, next_end_step_;
  v1::StepResult next_result_ = v1::STEP_APPLIED;
  std::string next_reason_;
  uint64_t doorbells_ = 0;

  // The job.
  static constexpr uint32_t kSessionLines = 16;
  static constexpr uint64_t kWindowBytes = 4096;  // small: reads go in several windows
  static constexpr uint64_t kJobTag = 4711;
  uint64_t timeline_ = 99;
  v1::JobConfig config_;
  std::unique_ptr<contract::Layout> layout_;
  MemoryFile weights_;
  uint64_t weights_offset_ = 0;
  uint32_t world_size_ = 0;
  bool running_ = false;
  uint64_t generation_ = 1;
  uint64_t committed_ = 0;
  uint64_t applied_ = 0;
  uint64_t missing_elements_ = 0;
  std::string blob_;
  std::vector<float> masters_;                   // flat
  std::map<uint64_t, std::vector<Part>> parts_;  // of the current step, by bucket
  std::map<uint64_t, bool> folded_;              // buckets of the current step
  std::vector<float> sum_;                       // flat, of the current step
  std::map<uint64_t, std::vector<float>> sums_;  // by decided step
  std::vector<v1::EndStepRequest> end_steps_;
  std::vector<v1::StepRecord> records_;
};

}  // namespace shardd

#endif  // SHARDD_CLIENT_FAKE_DAEMON_H_
