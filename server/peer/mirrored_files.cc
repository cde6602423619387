#include "server/peer/mirrored_files.h"

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "server/peer/message.h"

namespace shardd::peer {

namespace {

using Mirror = v1::PeerMessage::Mirror;

Mirror OperationOn(Mirror::Operation what, const std::string& name, uint64_t offset = 0) {
  Mirror operation;
  operation.set_operation(what);
  operation.set_file(name);
  operation.set_offset(offset);
  return operation;
}

class MirroredFile final : public env::File {
 public:
  MirroredFile(std::unique_ptr<env::File> base, std::shared_ptr<std::string> name,
               JobMirror* mirror, env::Failpoints* failpoints)
      : base_(std::move(base)), name_(std::move(name)), mirror_(mirror), failpoints_(failpoints) {}

  const std::string& path() const override { return base_->path(); }
  bool direct() const override { return base_->direct(); }
  absl::StatusOr<size_t> ReadAt(uint64_t offset, std::span<std::byte> out) override {
    return base_->ReadAt(offset, out);
  }
  absl::StatusOr<uint64_t> Size() override { return base_->Size(); }
  void DropCache(uint64_t offset, uint64_t bytes) override { base_->DropCache(offset, bytes); }

  absl::Status WriteAt(uint64_t offset,
                       std::span<const std::span<const std::byte>> parts) override {
    const std::shared_lock order(mirror_->order());
    if (absl::Status status = base_->WriteAt(offset, parts); !status.ok()) return status;
    std::string piece;
    const auto flush = [&] {
      const uint64_t bytes = piece.size();
      mirror_->Forward(OperationOn(Mirror::WRITE, *name_, offset), std::exchange(piece, ""));
      offset += bytes;
    };
    for (std::span<const std::byte> part : parts) {
      while (!part.empty()) {
        const size_t take = std::min(part.size(), kMaxPieceBytes - piece.size());
        piece.append(reinterpret_cast<const char*>(part.data()), take);
        part = part.subspan(take);
        if (piece.size() == kMaxPieceBytes) flush();
      }
    }
    if (!piece.empty()) flush();
    return absl::OkStatus();
  }

  // Both at once.
  absl::Status Sync() override {
    JobMirror::Ticket ticket;
    {
      const std::shared_lock order(mirror_->order());
      ticket = mirror_->Forward(OperationOn(Mirror::SYNC_FILE, *name_));
    }
    if (ticket.number > 0) failpoints_->Reach("mirror.sync.before_wait");
    const absl::Status here = base_->Sync();
    return here.ok() ? mirror_->Await(ticket) : here;
  }

  absl::Status Preallocate(uint64_t bytes) override {
    const std::shared_lock order(mirror_->order());
    if (absl::Status status = base_->Preallocate(bytes); !status.ok()) return status;
    mirror_->Forward(OperationOn(Mirror::ALLOCATE, *name_, bytes));
    return absl::OkStatus();
  }
  absl::Status Truncate(uint64_t bytes) override {
    const std::shared_lock order(mirror_->order());
    if (absl::Status status = base_->Truncate(bytes); !status.ok()) return status;
    mirror_->Forward(OperationOn(Mirror::TRUNCATE, *name_, bytes));
    return absl::OkStatus();
  }

 private:
  std::unique_ptr<env::File> base_;
  const std::shared_ptr<const std::string> name_;  // read with the order held
  JobMirror* mirror_;
  env::Failpoints* failpoints_;
};

}  // namespace

std::optional<std::string> MirroredFileSystem::NameOf(const std::string& path) const {
  if (path.size() <= directory_.size() + 1 || path.compare(0, directory_.size(), directory_) != 0 ||
      path[directory_.size()] != '/') {
    return std::nullopt;
  }
  return path.substr(directory_.size() + 1);
}

std::shared_ptr<std::string> MirroredFileSystem::Track(const std::string& name) {
  std::erase_if(tracked_, [](const std::weak_ptr<std::string>& weak) { return weak.expired(); });
  auto tracked = std::make_shared<std::string>(name);
  tracked_.push_back(tracked);
  return tracked;
}

absl::StatusOr<std::unique_ptr<env::File>> MirroredFileSystem::Open(
    const std::string& path, const env::OpenOptions& options) {
  const std::optional<std::string> name = NameOf(path);
  if (!name.has_value() || options.mode == env::OpenMode::kRead) return base_->Open(path, options);
  const bool creates = options.mode != env::OpenMode::kReadWrite;
  const std::unique_lock order(mirror_->order());
  absl::StatusOr<std::unique_ptr<env::File>> file = base_->Open(path, options);
  if (!file.ok()) return file.status();
  if (creates) mirror_->Forward(OperationOn(Mirror::CREATE, *name));
  return std::make_unique<MirroredFile>(*std::move(file), Track(*name), mirror_, failpoints_);
}

absl::Status MirroredFileSystem::SyncDirectory(const std::string& path) {
  if (path != directory_) return base_->SyncDirectory(path);
  JobMirror::Ticket ticket;
  {
    const std::shared_lock order(mirror_->order());
    ticket = mirror_->Forward(OperationOn(Mirror::SYNC_NAMES, ""));
  }
  const absl::Status here = base_->SyncDirectory(path);
  return here.ok() ? mirror_->Await(ticket) : here;
}

absl::Status MirroredFileSystem::Rename(const std::string& from, const std::string& to) {
  const std::unique_lock order(mirror_->order());
  if (absl::Status status = base_->Rename(from, to); !status.ok()) return status;
  const std::optional<std::string> old_name = NameOf(from), new_name = NameOf(to);
  if (old_name.has_value() && new_name.has_value()) {
    for (const std::weak_ptr<std::string>& weak : tracked_) {
      const std::shared_ptr<std::string> name = weak.lock();
      if (name != nullptr && *name == *old_name) *name = *new_name;
    }
    Mirror rename = OperationOn(Mirror::RENAME, *old_name);
    rename.set_to(*new_name);
    mirror_->Forward(std::move(rename));
  } else if (from == directory_ || to == directory_ || old_name.has_value() ||
             new_name.has_value()) {
    mirror_->Break("its directory was replaced");
  }
  return absl::OkStatus();
}

absl::Status MirroredFileSystem::Remove(const std::string& path) {
  const std::unique_lock order(mirror_->order());
  if (absl::Status status = base_->Remove(path); !status.ok()) return status;
  if (const auto name = NameOf(path)) mirror_->Forward(OperationOn(Mirror::REMOVE, *name));
  return absl::OkStatus();
}

absl::Status MirroredFileSystem::RemoveDirectory(const std::string& path) {
  if (path == directory_) mirror_->Break("its directory was removed");
  return base_->RemoveDirectory(path);
}

}  // namespace shardd::peer
