// A daemon's mirrors: those that it keeps for others, those that others keep for it, and how what
// was lost comes back (docs/formats/mirror.md).
#ifndef SHARDD_SERVER_PEER_MIRRORS_H_
#define SHARDD_SERVER_PEER_MIRRORS_H_

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "proto/daemon_config.pb.h"
#include "server/env/failpoints.h"
#include "server/env/file_system.h"
#include "server/env/task_queue.h"
#include "server/peer/job_mirror.h"
#include "server/peer/links.h"
#include "server/peer/mirror_store.h"

namespace shardd::peer {

// Thread-safe.
class Mirrors {
 public:
  struct Options {
    Links* links = nullptr;  // outlives this
    env::FileSystem* files = nullptr;
    env::Failpoints* failpoints = nullptr;
    v1::DaemonConfig::Journal config;  // with its defaults
    std::function<void(const std::string&)> log;
    // What the peer mirrors for this daemon. Must not block.
    std::function<void(v1::PeerMessage::MirrorList)> on_list;
  };
  // Before the links are started.
  static absl::StatusOr<std::unique_ptr<Mirrors>> Open(Options options);
  ~Mirrors();
  // Ends what waits. After the links' Stop. Idempotent.
  void Stop();

  // From the links; never block. True: the message was about mirrors.
  bool OnMessage(const std::string& peer, Message* message);
  void OnNewProcess(const std::string& peer);

  // Where the journals of jobs with durability = peer go; empty: nowhere, since this daemon keeps
  // no journals or has no peers.
  const std::string& peer() const { return peer_; }
  // For a job that has its journal in `directory`.
  std::shared_ptr<JobMirror> MirrorOf(const std::string& job, uint64_t tag,
                                      const std::string& directory);
  // The peer is to delete the mirror of a job (0: whichever of that name), when it is reached if
  // not now. Durable on return; before the job's journal is removed.
  absl::Status Delete(const std::string& job, uint64_t tag);
  // Whether Delete was said and the peer has not yet confirmed it.
  bool Deleting(const std::string& job, uint64_t tag) const;

  // Asks the peer again what it mirrors; on_list follows.
  void AskList();
  // Brings a journal of the list back: durable, under its name in journal.directory. Blocks; one
  // at a time. Unavailable: the peer stopped answering. ResourceExhausted: there is no room.
  absl::Status Fetch(const v1::PeerMessage::MirroredJob& job);

 private:
  explicit Mirrors(Options options);
  absl::Status ReadNotes();
  std::string NotePath(const std::string& job, uint64_t tag) const;
  void SendDelete(const std::string& job, uint64_t tag);
  void OnAnswer(const std::string& peer, const std::string& job,
                const v1::PeerMessage::MirrorAnswer& answer);
  void OnData(Message* message);
  absl::Status FetchFile(const v1::PeerMessage::MirroredJob& job,
                         const v1::PeerMessage::MirroredFile& named, const std::string& directory);
  absl::StatusOr<std::string> AwaitData(uint64_t request);

  const Options options_;
  const std::string peer_;
  MirrorStore store_;  // the keeper's thread only
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;                                     // under mutex_
  bool reached_ = false;                                  // the peer's process is known
  uint64_t processes_ = 0;                                // of the peer, so far
  std::map<std::string, std::weak_ptr<JobMirror>> jobs_;  // under mutex_
  std::set<std::pair<std::string, uint64_t>> deleting_;   // noted; under mutex_
  std::mutex fetching_;                                   // one at a time
  uint64_t next_request_ = 1;                             // under mutex_
  std::map<uint64_t, Message> data_;                      // came; under mutex_
  absl::Time data_at_;                                    // the last; under mutex_
  env::TaskQueue keeper_{1};                              // last: its thread uses the rest
};

}  // namespace shardd::peer

#endif  // SHARDD_SERVER_PEER_MIRRORS_H_
