#include "server/peer/mirrors.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace shardd::peer {

namespace {

using Mirror = v1::PeerMessage::Mirror;

constexpr uint64_t kReadsAhead = 8;

std::span<const std::byte> AsBytes(const std::string& bytes) {
  return std::as_bytes(std::span(bytes));
}

}  // namespace

Mirrors::Mirrors(Options options)
    : options_(std::move(options)),
      peer_(options_.config.directory().empty() ? "" : options_.config.mirror()),
      store_({options_.links->self(), options_.config.directory(), options_.files,
              options_.failpoints}) {}

Mirrors::~Mirrors() { Stop(); }

absl::StatusOr<std::unique_ptr<Mirrors>> Mirrors::Open(Options options) {
  std::unique_ptr<Mirrors> mirrors(new Mirrors(std::move(options)));
  if (absl::Status status = mirrors->store_.Open(); !status.ok()) return status;
  if (absl::Status status = mirrors->ReadNotes(); !status.ok()) return status;
  return mirrors;
}

void Mirrors::Stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  keeper_.Stop();
}

// --- Deletions, noted until the peer has confirmed them.

std::string Mirrors::NotePath(const std::string& job, uint64_t tag) const {
  return absl::StrCat(options_.config.directory(), "/.unmirror/", job, "@",
                      absl::Hex(tag, absl::kZeroPad16));
}

absl::Status Mirrors::ReadNotes() {
  if (peer_.empty()) return absl::OkStatus();
  absl::StatusOr<std::vector<std::string>> names =
      options_.files->List(env::JoinPath(options_.config.directory(), ".unmirror"));
  if (absl::IsNotFound(names.status())) return absl::OkStatus();
  if (!names.ok()) return names.status();
  for (const std::string& name : *names) {
    const size_t at = name.find('@');
    uint64_t tag = 0;
    if (at == std::string::npos || !absl::SimpleHexAtoi(name.substr(at + 1), &tag)) continue;
    deleting_.emplace(name.substr(0, at), tag);
  }
  return absl::OkStatus();
}

absl::Status Mirrors::Delete(const std::string& job, uint64_t tag) {
  if (peer_.empty()) return absl::OkStatus();
  const std::string path = NotePath(job, tag);
  if (absl::Status s = env::MakeDirectories(options_.files, env::ParentOf(path)); !s.ok()) return s;
  if (absl::Status s = env::ReplaceFile(options_.files, path, {}); !s.ok()) return s;
  options_.failpoints->Reach("mirror.delete.after_note");
  const std::lock_guard lock(mutex_);
  deleting_.emplace(job, tag);
  if (reached_) SendDelete(job, tag);
  return absl::OkStatus();
}

bool Mirrors::Deleting(const std::string& job, uint64_t tag) const {
  const std::lock_guard lock(mutex_);
  return deleting_.contains({job, tag}) || deleting_.contains({job, 0});
}

void Mirrors::SendDelete(const std::string& job, uint64_t tag) {
  Message message;
  message.header.set_job(job);
  Mirror* mirror = message.header.mutable_mirror();
  mirror->set_operation(Mirror::DELETE);
  mirror->set_tag(tag);
  mirror->set_answer(true);
  options_.links->Send(peer_, std::move(message));
}

void Mirrors::OnAnswer(const std::string& peer, const std::string& job,
                       const v1::PeerMessage::MirrorAnswer& answer) {
  if (peer != peer_) return;
  if (!answer.deleted()) {
    std::shared_ptr<JobMirror> mirror;
    {
      const std::lock_guard lock(mutex_);
      const auto it = jobs_.find(job);
      if (it != jobs_.end()) mirror = it->second.lock();
    }
    if (mirror != nullptr) mirror->OnAnswer(answer);
    return;
  }
  if (answer.code() != 0) {
    options_.log(
        absl::StrCat("peer ", peer, " cannot delete the mirror of job ", job, ": ", answer.text()));
    return;
  }
  keeper_.Post([this, job, tag = answer.tag()] {
    {
      const std::lock_guard lock(mutex_);
      if (deleting_.erase({job, tag}) == 0) return;
    }
    const std::string path = NotePath(job, tag);
    absl::Status status = options_.files->Remove(path);
    if (status.ok()) status = options_.files->SyncDirectory(env::ParentOf(path));
    if (!status.ok()) options_.log(std::string(status.message()));
  });
}

// --- What comes.

bool Mirrors::OnMessage(const std::string& peer, Message* message) {
  const v1::PeerMessage& header = message->header;
  switch (header.what_case()) {
    case v1::PeerMessage::kMirror: {
      auto moved = std::make_shared<Message>(std::move(*message));
      keeper_.Post([this, peer, moved] {
        auto answer =
            store_.Apply(peer, moved->header.job(), moved->header.mirror(), AsBytes(moved->bytes));
        if (!answer.has_value()) return;
        Message reply;
        reply.header.set_job(moved->header.job());
        *reply.header.mutable_mirror_answer() = *std::move(answer);
        options_.links->Send(peer, std::move(reply));
      });
      return true;
    }
    case v1::PeerMessage::kMirrorAnswer:
      OnAnswer(peer, header.job(), header.mirror_answer());
      return true;
    case v1::PeerMessage::kMirrorAsk:
      keeper_.Post([this, peer] {
        Message reply;
        *reply.header.mutable_mirror_list() = store_.List(peer);
        options_.links->Send(peer, std::move(reply));
      });
      return true;
    case v1::PeerMessage::kMirrorList:
      if (peer == peer_) options_.on_list(header.mirror_list());
      return true;
    case v1::PeerMessage::kMirrorRead:
      keeper_.Post([this, peer, asked = header] {
        absl::StatusOr<std::string> bytes = store_.Read(peer, asked.job(), asked.mirror_read());
        Message reply;
        reply.header.set_job(asked.job());
        v1::PeerMessage::MirrorData* data = reply.header.mutable_mirror_data();
        data->set_request(asked.mirror_read().request());
        data->set_code(static_cast<int32_t>(bytes.status().code()));
        data->set_text(std::string(bytes.status().message()));
        if (bytes.ok()) reply.bytes = *std::move(bytes);
        options_.links->Send(peer, std::move(reply));
      });
      return true;
    case v1::PeerMessage::kMirrorData:
      if (peer == peer_) OnData(message);
      return true;
    default:
      return false;
  }
}

void Mirrors::OnNewProcess(const std::string& peer) {
  if (peer != peer_) return;
  std::vector<std::shared_ptr<JobMirror>> jobs;
  {
    const std::lock_guard lock(mutex_);
    reached_ = true;
    ++processes_;
    data_.clear();
    // Before what a later job of that name says.
    for (const auto& [job, tag] : deleting_) SendDelete(job, tag);
    for (const auto& [name, weak] : jobs_) {
      if (auto job = weak.lock()) jobs.push_back(std::move(job));
    }
  }
  changed_.notify_all();
  for (const auto& job : jobs) job->OnNewProcess();
  AskList();
}

std::shared_ptr<JobMirror> Mirrors::MirrorOf(const std::string& job, uint64_t tag,
                                             const std::string& directory) {
  JobMirror::Options options;
  options.links = options_.links;
  options.files = options_.files;
  options.failpoints = options_.failpoints;
  options.peer = peer_;
  options.job = job;
  options.tag = tag;
  options.directory = directory;
  options.degrade = options_.config.on_failure() == "degrade";
  options.patience = absl::Seconds(options_.config.mirror_seconds());
  options.log = options_.log;
  const std::lock_guard lock(mutex_);
  options.reached = reached_;
  auto mirror = std::make_shared<JobMirror>(std::move(options));
  jobs_[job] = mirror;
  return mirror;
}

// --- Bringing back what was lost.

void Mirrors::AskList() {
  if (peer_.empty()) return;
  Message message;
  message.header.mutable_mirror_ask();
  options_.links->Send(peer_, std::move(message));
}

void Mirrors::OnData(Message* message) {
  {
    const std::lock_guard lock(mutex_);
    // Nobody waits for more than that.
    if (data_.size() >= 2 * kReadsAhead) return;
    data_at_ = absl::Now();
    data_[message->header.mirror_data().request()] = std::move(*message);
  }
  changed_.notify_all();
}

absl::StatusOr<std::string> Mirrors::AwaitData(uint64_t request) {
  std::unique_lock lock(mutex_);
  const uint64_t process = processes_;
  const absl::Duration patience = absl::Seconds(options_.config.mirror_seconds());
  data_at_ = absl::Now();
  while (!data_.contains(request)) {
    if (stop_) return absl::CancelledError("the daemon is ending");
    if (processes_ != process) {
      return absl::UnavailableError(absl::StrCat("peer ", peer_, " has ended meanwhile"));
    }
    const absl::Time until = data_at_ + patience;
    if (absl::Now() >= until) {
      return absl::UnavailableError(absl::StrCat("peer ", peer_, " has sent nothing for ",
                                                 absl::FormatDuration(patience),
                                                 " (journal.mirror_seconds)"));
    }
    changed_.wait_until(lock, absl::ToChronoTime(until));
  }
  Message message = std::move(data_[request]);
  data_.erase(request);
  const v1::PeerMessage::MirrorData& data = message.header.mirror_data();
  if (data.code() != 0) {
    return absl::Status(static_cast<absl::StatusCode>(data.code()),
                        absl::StrCat("peer ", peer_, ": ", data.text()));
  }
  return std::move(message.bytes);
}

absl::Status Mirrors::FetchFile(const v1::PeerMessage::MirroredJob& job,
                                const v1::PeerMessage::MirroredFile& named,
                                const std::string& directory) {
  if (!IsPlainName(named.name())) {
    return absl::InvalidArgumentError(
        absl::StrCat("peer ", peer_, " names a file '", named.name(), "', which no journal has"));
  }
  absl::StatusOr<std::unique_ptr<env::File>> file = options_.files->Open(
      env::JoinPath(directory, named.name()), {.mode = env::OpenMode::kCreate});
  if (!file.ok()) return file.status();
  if (named.bytes() > 0) {
    if (absl::Status s = (*file)->Preallocate(named.bytes()); !s.ok()) return s;
  }
  const uint64_t pieces = (named.bytes() + kMaxPieceBytes - 1) / kMaxPieceBytes;
  uint64_t first = 0;
  {
    const std::lock_guard lock(mutex_);
    first = next_request_;
    next_request_ += pieces;
    data_.clear();
  }
  const auto ask = [&](uint64_t piece) {
    Message message;
    message.header.set_job(job.job());
    v1::PeerMessage::MirrorRead* read = message.header.mutable_mirror_read();
    read->set_request(first + piece);
    read->set_tag(job.tag());
    read->set_file(named.name());
    read->set_offset(piece * kMaxPieceBytes);
    read->set_bytes(kMaxPieceBytes);
    options_.links->Send(peer_, std::move(message));
  };
  for (uint64_t p = 0; p < std::min(pieces, kReadsAhead); ++p) ask(p);
  for (uint64_t p = 0; p < pieces; ++p) {
    absl::StatusOr<std::string> bytes = AwaitData(first + p);
    if (!bytes.ok()) return bytes.status();
    if (p + kReadsAhead < pieces) ask(p + kReadsAhead);
    if (!bytes->empty()) {
      const absl::Status s = (*file)->WriteAt(p * kMaxPieceBytes, AsBytes(*bytes));
      if (!s.ok()) return s;
    }
    options_.failpoints->Reach("mirror.fetch.after_piece");
  }
  return (*file)->Sync();
}

absl::Status Mirrors::Fetch(const v1::PeerMessage::MirroredJob& job) {
  if (!IsPlainName(job.job())) {
    return absl::InvalidArgumentError(
        absl::StrCat("peer ", peer_, " names a job '", job.job(), "'"));
  }
  const std::lock_guard one(fetching_);
  const std::string& parent = options_.config.directory();
  const std::string building = absl::StrCat(parent, "/.", job.job(), ".fetched.new");
  uint64_t total = 0;
  for (const auto& file : job.files()) total += file.bytes();
  const auto fetch = [&]() -> absl::Status {
    if (absl::Status s = env::RemoveTree(options_.files, building); !s.ok()) return s;
    absl::StatusOr<uint64_t> free = options_.files->FreeBytes(parent);
    if (!free.ok()) return free.status();
    if (total > *free) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the journal of job '", job.job(), "' at peer ", peer_, " needs ", total,
                       " bytes in ", parent, ", which has ", *free, " free; make room"));
    }
    if (absl::Status s = options_.files->MakeDirectory(building); !s.ok()) return s;
    for (const auto& file : job.files()) {
      if (absl::Status s = FetchFile(job, file, building); !s.ok()) return s;
    }
    if (absl::Status s = options_.files->SyncDirectory(building); !s.ok()) return s;
    options_.failpoints->Reach("mirror.fetch.before_rename");
    const absl::Status s = options_.files->Rename(building, env::JoinPath(parent, job.job()));
    return s.ok() ? options_.files->SyncDirectory(parent) : s;
  };
  options_.log(absl::StrCat("job ", job.job(), ": its journal (", total,
                            " bytes) is being fetched from peer ", peer_));
  const absl::Status status = fetch();
  if (!status.ok()) (void)env::RemoveTree(options_.files, building);
  return status;
}

}  // namespace shardd::peer
