// The sending side of a job's mirror: a job with durability = peer writes its journal through
// files(), which does everything on this machine's disk and tells the peer of it, in order.
//
// The mirror is *in step* when the peer has all that was written, and has synced all that was
// synced. It falls *behind* when the peer's process ends, an operation fails there, or nothing is
// acknowledged for too long; then the journal's directory is sent whole, while the journal goes on
// writing, and the copy takes the place of the mirror when it is complete.
#ifndef SHARDD_SERVER_PEER_JOB_MIRROR_H_
#define SHARDD_SERVER_PEER_JOB_MIRROR_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "proto/peer.pb.h"
#include "server/env/aligned_buffer.h"
#include "server/env/failpoints.h"
#include "server/env/file_system.h"
#include "server/peer/links.h"

namespace shardd::peer {

enum class MirrorState { kBehind, kCopying, kInStep };

struct MirrorStatus {
  std::string peer;
  MirrorState state = MirrorState::kBehind;
  std::string why;      // it is behind, or the peer late
  uint64_t copied = 0;  // of `bytes`, while it is being copied
  uint64_t bytes = 0;
  // "in step", "being copied: 42 %", "behind: " and why.
  std::string Text() const;
};

// Thread-safe.
class JobMirror {
 public:
  struct Options {
    Links* links = nullptr;
    env::FileSystem* files = nullptr;  // this machine's
    env::Failpoints* failpoints = nullptr;
    std::string peer;
    std::string job;
    uint64_t tag = 0;
    std::string directory;  // of the job's journal
    // What a sync does while the mirror is not in step: fails, or (degrade) is of this machine
    // alone.
    bool degrade = false;
    absl::Duration patience = absl::Seconds(10);
    std::function<void(const std::string&)> log;
    bool reached = false;  // whether the peer's process is known
  };
  explicit JobMirror(Options options);
  ~JobMirror();
  JobMirror(const JobMirror&) = delete;
  JobMirror& operator=(const JobMirror&) = delete;

  // Of this machine, mirrored once the mirror has been started. Lives as long as this.
  env::FileSystem* files();
  // The directory is there. Once.
  void Start();
  // Ends what waits, and says nothing more to the peer. Idempotent.
  void Stop();

  // From the links; never block.
  void OnNewProcess();
  void OnAnswer(const v1::PeerMessage::MirrorAnswer& answer);

  MirrorStatus status() const;
  bool in_step() const { return status().state == MirrorState::kInStep; }

  // For files().
  struct Ticket {
    uint64_t session = 0;
    uint64_t number = 0;  // 0: not sent
  };
  // Held shared while something is done here and forwarded, alone while names change.
  std::shared_mutex& order() { return order_; }
  // Waits while too much is on the way. What the mirror cannot take makes it fall behind.
  Ticket Forward(v1::PeerMessage::Mirror operation, std::string bytes = "");
  // Until the peer has done that, or has a later copy of the whole. Unavailable says why it has not
  // (never with degrade).
  absl::Status Await(const Ticket& ticket);
  void Break(const std::string& why);

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Mirror = v1::PeerMessage::Mirror;
  struct Asked {
    uint64_t number = 0;
    uint64_t sent_bytes = 0;
  };
  void CopierMain();
  absl::Status Copy(uint64_t session);
  struct CopiedFile {
    std::shared_ptr<const std::string> name;  // as it is now; read with the order held
    uint64_t bytes = 0;
  };
  absl::Status CopyNames(uint64_t session, std::vector<CopiedFile>* files);
  absl::Status CopyPiece(const CopiedFile& copied, uint64_t offset, env::AlignedBuffer* buffer);
  // Waits for `done` as long as the peer acknowledges something now and then; false: it does not.
  bool AwaitProgress(Lock* lock, const std::function<bool()>& done);
  bool HasRoom(uint64_t bytes) const;
  Ticket Send(Mirror operation, std::string bytes);
  void FallBehind(const std::string& why, absl::Duration pause);
  std::string Silence() const;

  const Options options_;
  std::unique_ptr<class MirroredFileSystem> mirrored_;
  std::shared_mutex order_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // All below under mutex_.
  MirrorState state_ = MirrorState::kBehind;
  std::string why_ = "it has not been begun";
  std::string said_;  // in the log
  bool reached_ = false;
  bool failed_ = false;        // behind, and tried again after a pause
  bool forwarding_ = false;    // kCopying and kInStep
  uint64_t session_;           // a new one whenever it falls behind
  uint64_t number_ = 0;        // of the last operation
  uint64_t acknowledged_ = 0;  // up to which the peer has done them
  uint64_t sent_bytes_ = 0, asked_bytes_ = 0, acknowledged_bytes_ = 0;
  std::deque<Asked> asked_;  // answers that are due
  absl::Time progress_;      // when something was acknowledged last, or nothing was due
  absl::Time retry_at_ = absl::InfinitePast();
  uint64_t copied_ = 0, copy_bytes_ = 0;
  bool stop_ = false;
  std::thread copier_;
};

}  // namespace shardd::peer

#endif  // SHARDD_SERVER_PEER_JOB_MIRROR_H_
