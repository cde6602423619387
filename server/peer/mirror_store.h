// Mirrors of other daemons' journals, as files of this one (docs/formats/mirror.md):
//
//   DIRECTORY/.mirror/PEER/JOB@TAG@N      the N-th copy of the journal of that peer's job; counts
//   DIRECTORY/.mirror/PEER/JOB@TAG@N.new  one that is being sent, or removed
//
// A peer names jobs and files of its own directory alone: whatever else it says is refused.
#ifndef SHARDD_SERVER_PEER_MIRROR_STORE_H_
#define SHARDD_SERVER_PEER_MIRROR_STORE_H_

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/peer.pb.h"
#include "server/env/failpoints.h"
#include "server/env/file_system.h"

namespace shardd::peer {

// Whether `name` is 1 to 80 of [A-Za-z0-9._-] without a leading '.'.
bool IsPlainName(const std::string& name);

// One thread at a time.
class MirrorStore {
 public:
  struct Options {
    std::string self;
    std::string directory;  // journal.directory; empty: everything is refused
    env::FileSystem* files = nullptr;
    env::Failpoints* failpoints = nullptr;
  };
  explicit MirrorStore(Options options) : options_(std::move(options)) {}

  // Removes what counts no more. Before all else.
  absl::Status Open();

  // Does an operation of `peer`. The answer that is due, if any. Durable on an OK answer to
  // COMPLETE, SYNC_FILE, SYNC_NAMES and DELETE.
  std::optional<v1::PeerMessage::MirrorAnswer> Apply(const std::string& peer,
                                                     const std::string& job,
                                                     const v1::PeerMessage::Mirror& operation,
                                                     std::span<const std::byte> bytes);
  // What counts, of `peer`.
  v1::PeerMessage::MirrorList List(const std::string& peer) const;
  // A piece of a file that List named; empty if it is all zeros.
  absl::StatusOr<std::string> Read(const std::string& peer, const std::string& job,
                                   const v1::PeerMessage::MirrorRead& what) const;

 private:
  // A directory that counts, or will.
  struct Copy {
    std::string job;
    uint64_t tag = 0;
    uint64_t number = 0;
    std::string path;
    bool complete = false;
  };
  // What a peer is sending, or goes on sending after it was complete.
  struct Session {
    uint64_t id = 0;
    bool failed = false;
    Copy copy;
    std::map<std::string, std::unique_ptr<env::File>> files;  // open
  };
  std::string PeerPath(const std::string& peer) const;
  absl::StatusOr<std::vector<Copy>> Copies(const std::string& peer) const;
  std::optional<Copy> Newest(const std::string& peer, const std::string& job) const;
  absl::Status Remove(const Copy& copy);
  absl::Status Begin(const std::string& peer, const std::string& job,
                     const v1::PeerMessage::Mirror& operation);
  absl::Status Complete(const std::string& peer, Session* session);
  absl::Status Delete(const std::string& peer, const std::string& job, uint64_t tag);
  absl::Status Do(Session* session, const v1::PeerMessage::Mirror& operation,
                  std::span<const std::byte> bytes);
  absl::Status Allocate(env::File* file, const std::string& directory, uint64_t bytes);
  absl::StatusOr<env::File*> FileOf(Session* session, const std::string& name, bool create);

  const Options options_;
  std::map<std::pair<std::string, std::string>, Session> sessions_;  // by peer and job
};

}  // namespace shardd::peer

#endif  // SHARDD_SERVER_PEER_MIRROR_STORE_H_
