#include "server/peer/mirror_store.h"

#include <algorithm>
#include <array>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/peer/message.h"

namespace shardd::peer {

namespace {

using Mirror = v1::PeerMessage::Mirror;

constexpr char kBuilding[] = ".new";
constexpr uint64_t kMaxFileBytes = uint64_t{1} << 50;

absl::Status CheckName(const char* what, const std::string& name) {
  if (IsPlainName(name)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the name of a mirrored ", what, ", '", name.substr(0, 100),
                   "', is not 1 to 80 of [A-Za-z0-9._-] without a leading '.'; it is refused"));
}

std::string DirectoryName(const std::string& job, uint64_t tag, uint64_t number) {
  return absl::StrCat(job, "@", absl::Hex(tag, absl::kZeroPad16), "@", number);
}

bool IsZero(const std::string& bytes) { return bytes.find_first_not_of('\0') == std::string::npos; }

}  // namespace

bool IsPlainName(const std::string& name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  };
  return !name.empty() && name.size() <= 80 && name.front() != '.' &&
         std::all_of(name.begin(), name.end(), allowed);
}

std::string MirrorStore::PeerPath(const std::string& peer) const {
  return env::JoinPath(env::JoinPath(options_.directory, ".mirror"), peer);
}

absl::StatusOr<std::vector<MirrorStore::Copy>> MirrorStore::Copies(const std::string& peer) const {
  std::vector<Copy> copies;
  absl::StatusOr<std::vector<std::string>> names = options_.files->List(PeerPath(peer));
  if (absl::IsNotFound(names.status())) return copies;
  if (!names.ok()) return names.status();
  for (const std::string& name : *names) {
    Copy copy;
    copy.complete = !absl::EndsWith(name, kBuilding);
    const std::string whole =
        copy.complete ? name : name.substr(0, name.size() - (sizeof(kBuilding) - 1));
    const std::vector<std::string> parts = absl::StrSplit(whole, '@');
    if (parts.size() != 3 || !IsPlainName(parts[0]) || !absl::SimpleHexAtoi(parts[1], &copy.tag) ||
        !absl::SimpleAtoi(parts[2], &copy.number)) {
      continue;
    }
    copy.job = parts[0];
    copy.path = env::JoinPath(PeerPath(peer), name);
    copies.push_back(std::move(copy));
  }
  return copies;
}

std::optional<MirrorStore::Copy> MirrorStore::Newest(const std::string& peer,
                                                     const std::string& job) const {
  std::optional<Copy> newest;
  absl::StatusOr<std::vector<Copy>> copies = Copies(peer);
  if (!copies.ok()) return newest;
  for (Copy& copy : *copies) {
    if (copy.job != job || !copy.complete) continue;
    if (!newest.has_value() || copy.number > newest->number) newest = std::move(copy);
  }
  return newest;
}

// So that a crash meanwhile leaves nothing that counts.
absl::Status MirrorStore::Remove(const Copy& copy) {
  std::string path = copy.path;
  if (copy.complete) {
    path += kBuilding;
    if (absl::Status s = env::RemoveTree(options_.files, path); !s.ok()) return s;
    if (absl::Status s = options_.files->Rename(copy.path, path); !s.ok()) return s;
    if (absl::Status s = options_.files->SyncDirectory(env::ParentOf(path)); !s.ok()) return s;
  }
  return env::RemoveTree(options_.files, path);
}

absl::Status MirrorStore::Open() {
  if (options_.directory.empty()) return absl::OkStatus();
  absl::StatusOr<std::vector<std::string>> peers =
      options_.files->List(env::JoinPath(options_.directory, ".mirror"));
  if (absl::IsNotFound(peers.status())) return absl::OkStatus();
  if (!peers.ok()) return peers.status();
  for (const std::string& peer : *peers) {
    absl::StatusOr<std::vector<Copy>> copies = Copies(peer);
    if (!copies.ok()) return copies.status();
    for (const Copy& copy : *copies) {
      if (copy.complete && Newest(peer, copy.job)->number == copy.number) continue;
      if (absl::Status status = Remove(copy); !status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

absl::Status MirrorStore::Begin(const std::string& peer, const std::string& job,
                                const Mirror& operation) {
  sessions_.erase({peer, job});
  const std::optional<Copy> before = Newest(peer, job);
  if (before.has_value() && before->tag != operation.tag()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "daemon ", options_.self, " holds the mirror of another job '", job, "' of ", peer, " in ",
        before->path, "; use another name, or remove that directory to give it up"));
  }
  absl::StatusOr<std::vector<Copy>> copies = Copies(peer);
  if (!copies.ok()) return copies.status();
  for (const Copy& copy : *copies) {
    if (copy.job != job || copy.complete) continue;
    if (absl::Status status = Remove(copy); !status.ok()) return status;
  }
  absl::Status status = env::MakeDirectories(options_.files, PeerPath(peer));
  if (!status.ok()) return status;
  absl::StatusOr<uint64_t> free = options_.files->FreeBytes(PeerPath(peer));
  if (!free.ok()) return free.status();
  if (operation.offset() > *free) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the mirror of job '", job, "' needs ", operation.offset(), " bytes in ", PeerPath(peer),
        " of daemon ", options_.self, ", which has ", *free, " free; make room there"));
  }
  Session& session = sessions_[{peer, job}];
  session.id = operation.session();
  session.copy.job = job;
  session.copy.tag = operation.tag();
  session.copy.number = before.has_value() ? before->number + 1 : 1;
  session.copy.path = env::JoinPath(
      PeerPath(peer), DirectoryName(job, operation.tag(), session.copy.number) + kBuilding);
  return options_.files->MakeDirectory(session.copy.path);
}

absl::Status MirrorStore::Complete(const std::string& peer, Session* session) {
  Copy& copy = session->copy;
  if (copy.complete) return absl::InvalidArgumentError("the mirror is complete already");
  absl::StatusOr<std::vector<std::string>> names = options_.files->List(copy.path);
  if (!names.ok()) return names.status();
  for (const std::string& name : *names) {
    absl::StatusOr<env::File*> file = FileOf(session, name, false);
    if (!file.ok()) return file.status();
    if (absl::Status status = (*file)->Sync(); !status.ok()) return status;
  }
  if (absl::Status s = options_.files->SyncDirectory(copy.path); !s.ok()) return s;
  options_.failpoints->Reach("mirror.store.before_rename");
  const std::string path =
      env::JoinPath(PeerPath(peer), DirectoryName(copy.job, copy.tag, copy.number));
  if (absl::Status s = options_.files->Rename(copy.path, path); !s.ok()) return s;
  if (absl::Status s = options_.files->SyncDirectory(PeerPath(peer)); !s.ok()) return s;
  copy.path = path;
  copy.complete = true;
  options_.failpoints->Reach("mirror.store.after_rename");
  absl::StatusOr<std::vector<Copy>> copies = Copies(peer);
  if (!copies.ok()) return copies.status();
  for (const Copy& old : *copies) {
    if (old.job != copy.job || old.number >= copy.number) continue;
    if (absl::Status status = Remove(old); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status MirrorStore::Delete(const std::string& peer, const std::string& job, uint64_t tag) {
  absl::StatusOr<std::vector<Copy>> copies = Copies(peer);
  if (!copies.ok()) return copies.status();
  for (const Copy& copy : *copies) {
    if (copy.job != job || (tag != 0 && copy.tag != tag)) continue;
    sessions_.erase({peer, job});
    if (absl::Status status = Remove(copy); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<env::File*> MirrorStore::FileOf(Session* session, const std::string& name,
                                               bool create) {
  std::unique_ptr<env::File>& open = session->files[name];
  if (create) open.reset();
  if (open == nullptr) {
    absl::StatusOr<std::unique_ptr<env::File>> file = options_.files->Open(
        env::JoinPath(session->copy.path, name),
        {.mode = create ? env::OpenMode::kCreateOrEmpty : env::OpenMode::kReadWrite});
    if (!file.ok()) return file.status();
    open = *std::move(file);
  }
  return open.get();
}

absl::Status MirrorStore::Allocate(env::File* file, const std::string& directory, uint64_t bytes) {
  if (bytes > kMaxFileBytes) {
    return absl::InvalidArgumentError(absl::StrCat("a mirrored file of ", bytes, " bytes"));
  }
  absl::StatusOr<env::FileInfo> info = options_.files->Stat(file->path());
  absl::StatusOr<uint64_t> free = options_.files->FreeBytes(directory);
  if (info.ok() && free.ok() && bytes > info->allocated_bytes + *free) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a mirrored file needs ", bytes, " bytes in ", directory, " of daemon ",
                     options_.self, ", which has ", *free, " free; make room there"));
  }
  return file->Preallocate(bytes);
}

absl::Status MirrorStore::Do(Session* session, const Mirror& operation,
                             std::span<const std::byte> bytes) {
  if (operation.operation() == Mirror::SYNC_NAMES) {
    return options_.files->SyncDirectory(session->copy.path);
  }
  if (absl::Status s = CheckName("file", operation.file()); !s.ok()) return s;
  const std::string path = env::JoinPath(session->copy.path, operation.file());
  if (operation.operation() == Mirror::RENAME) {
    if (absl::Status s = CheckName("file", operation.to()); !s.ok()) return s;
    session->files.erase(operation.file());
    session->files.erase(operation.to());
    return options_.files->Rename(path, env::JoinPath(session->copy.path, operation.to()));
  }
  if (operation.operation() == Mirror::REMOVE) {
    session->files.erase(operation.file());
    return options_.files->Remove(path);
  }
  absl::StatusOr<env::File*> file =
      FileOf(session, operation.file(), operation.operation() == Mirror::CREATE);
  if (!file.ok()) return file.status();
  switch (operation.operation()) {
    case Mirror::CREATE:
      return absl::OkStatus();
    case Mirror::WRITE: {
      if (operation.offset() > kMaxFileBytes) {
        return absl::InvalidArgumentError("a write beyond what a file may hold");
      }
      absl::Status status = (*file)->WriteAt(operation.offset(), bytes);
      // The last sync of a copy would take long otherwise.
      if (status.ok() && operation.answer() && !session->copy.complete) status = (*file)->Sync();
      return status;
    }
    case Mirror::ALLOCATE:
      return Allocate(*file, session->copy.path, operation.offset());
    case Mirror::TRUNCATE:
      return (*file)->Truncate(std::min(operation.offset(), kMaxFileBytes));
    case Mirror::SYNC_FILE: {
      const absl::Status status = (*file)->Sync();
      options_.failpoints->Reach("mirror.store.after_sync");
      return status;
    }
    default:
      return absl::InvalidArgumentError("an operation on mirrors that is not known");
  }
}

std::optional<v1::PeerMessage::MirrorAnswer> MirrorStore::Apply(const std::string& peer,
                                                                const std::string& job,
                                                                const Mirror& operation,
                                                                std::span<const std::byte> bytes) {
  const bool deletes = operation.operation() == Mirror::DELETE;
  absl::Status status = CheckName("job", job);
  if (status.ok()) status = CheckName("peer", peer);
  if (status.ok() && options_.directory.empty() && !deletes) {
    status = absl::FailedPreconditionError(
        absl::StrCat("daemon ", options_.self,
                     " keeps no journals, and so no mirrors; set its journal.directory"));
  }
  Session* session = nullptr;
  if (status.ok() && deletes) {
    if (!options_.directory.empty()) status = Delete(peer, job, operation.tag());
  } else if (status.ok() && operation.operation() == Mirror::BEGIN) {
    status = Begin(peer, job, operation);
  } else if (status.ok()) {
    const auto it = sessions_.find({peer, job});
    if (it != sessions_.end() && it->second.id != operation.session()) return std::nullopt;
    if (it == sessions_.end()) {
      if (!operation.answer()) return std::nullopt;
      status = absl::AbortedError("the mirror was begun anew, or its daemon was");
    } else {
      session = &it->second;
      if (session->failed) return std::nullopt;
      status = operation.operation() == Mirror::COMPLETE ? Complete(peer, session)
                                                         : Do(session, operation, bytes);
    }
  }
  if (status.ok() && !operation.answer()) return std::nullopt;
  if (!status.ok() && session != nullptr) session->failed = true;
  v1::PeerMessage::MirrorAnswer answer;
  answer.set_tag(operation.tag());
  answer.set_session(operation.session());
  answer.set_number(operation.number());
  answer.set_code(static_cast<int32_t>(status.code()));
  answer.set_text(std::string(status.message()));
  answer.set_deleted(deletes);
  return answer;
}

v1::PeerMessage::MirrorList MirrorStore::List(const std::string& peer) const {
  v1::PeerMessage::MirrorList list;
  if (options_.directory.empty()) return list;
  absl::StatusOr<std::vector<Copy>> copies = Copies(peer);
  if (!copies.ok()) return list;
  for (const Copy& copy : *copies) {
    if (!copy.complete || Newest(peer, copy.job)->number != copy.number) continue;
    absl::StatusOr<std::vector<std::string>> names = options_.files->List(copy.path);
    if (!names.ok()) continue;
    v1::PeerMessage::MirroredJob* job = list.add_jobs();
    job->set_job(copy.job);
    job->set_tag(copy.tag);
    for (const std::string& name : *names) {
      absl::StatusOr<env::FileInfo> info = options_.files->Stat(env::JoinPath(copy.path, name));
      if (!info.ok()) continue;
      v1::PeerMessage::MirroredFile* file = job->add_files();
      file->set_name(name);
      file->set_bytes(info->bytes);
    }
  }
  return list;
}

absl::StatusOr<std::string> MirrorStore::Read(const std::string& peer, const std::string& job,
                                              const v1::PeerMessage::MirrorRead& what) const {
  if (absl::Status s = CheckName("job", job); !s.ok()) return s;
  if (absl::Status s = CheckName("file", what.file()); !s.ok()) return s;
  const std::optional<Copy> copy = options_.directory.empty() ? std::nullopt : Newest(peer, job);
  if (!copy.has_value() || copy->tag != what.tag()) {
    return absl::NotFoundError(
        absl::StrCat("daemon ", options_.self, " mirrors no such job '", job, "' of ", peer));
  }
  absl::StatusOr<std::unique_ptr<env::File>> file =
      options_.files->Open(env::JoinPath(copy->path, what.file()), {});
  if (!file.ok()) return file.status();
  std::string bytes(std::min<uint64_t>(what.bytes(), kMaxPieceBytes), '\0');
  absl::StatusOr<size_t> read =
      (*file)->ReadAt(what.offset(), std::as_writable_bytes(std::span(bytes)));
  if (!read.ok()) return read.status();
  bytes.resize(*read);
  if (IsZero(bytes)) bytes.clear();
  return bytes;
}

}  // namespace shardd::peer
